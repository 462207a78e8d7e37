"""Stored bytes straight into parameters, by several threads.

For a GPU, each thread reads a piece of a file into pinned memory and lets the device copy it from
there on a stream of its own, while it reads the next piece into a second buffer. For a CPU it
reads into the parameter itself. Reading (not mapping) files that the system has in memory costs
one copy and no page faults; of others, several large reads at once keep a disk busy.

What is stored in another dtype than its parameter is converted on the parameter's device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.safetensors_header import CheckpointError

# On a CPU a piece that is converted stays in the cache; a GPU's copies want to be long.
PIECE_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
_BUFFERS = 2  # a thread reads one while the device copies the other
_MOST_THREADS = 8


@dataclasses.dataclass(frozen=True)
class ReadJob:
    """num_bytes of `file` from `offset` on, stored as `dtype`, for `destination`: a contiguous
    tensor of as many elements."""

    name: str
    file: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    destination: Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the bytes are the parameter's own."""
        return self.destination.dtype == self.dtype


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Bytes of a job, from `start` on; whole elements."""

    job: ReadJob
    start: int
    num_bytes: int


def default_threads() -> int:
    """As many as help: a few saturate the memory, and each has its own pinned buffers."""
    return min(_MOST_THREADS, os.cpu_count() or 1)


def read_directly(
    jobs: Sequence[ReadJob],
    *,
    on_read: Callable[[str, int], None],
    num_threads: int | None = None,
) -> None:
    """Run jobs whose destinations are on one device.

    on_read: called in this thread with a name and how many more bytes have been read. Raises
    CheckpointError when a file cannot be read or ends too early.
    """
    if not jobs:
        return
    pieces = [piece for job in _in_file_order(jobs) for piece in _split(job)]
    device = jobs[0].destination.device
    with _open_files(jobs) as files:
        threads = _Threads(pieces, files, device)
        threads.run(min(num_threads or default_threads(), len(pieces)), on_read)


def _in_file_order(jobs: Sequence[ReadJob]) -> list[ReadJob]:
    return sorted(jobs, key=lambda job: (str(job.file), job.offset))


def _split(job: ReadJob) -> Iterator[_Piece]:
    step = PIECE_BYTES[job.destination.device.type]
    for start in range(0, job.num_bytes, step):
        yield _Piece(job, start, min(step, job.num_bytes - start))


@contextlib.contextmanager
def _open_files(jobs: Sequence[ReadJob]) -> Iterator[dict[Path, int]]:
    files: dict[Path, int] = {}
    try:
        for file in dict.fromkeys(job.file for job in jobs):
            try:
                files[file] = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
        yield files
    finally:
        for descriptor in files.values():
            os.close(descriptor)


class _Threads:
    """Threads that share a list of pieces; the first error ends all of them."""

    def __init__(
        self, pieces: Sequence[_Piece], files: dict[Path, int], device: torch.device
    ) -> None:
        self._files, self._device = files, device
        self._pieces = iter(pieces)
        self._lock = threading.Lock()
        self._inference = torch.is_inference_mode_enabled()  # a thread starts without it
        self._told: queue.SimpleQueue[tuple[str, int] | BaseException | None] = queue.SimpleQueue()
        # What the device still does with the memory of the destinations comes first.
        self._ready: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(device))

    def run(self, count: int, on_read: Callable[[str, int], None]) -> None:
        threads = [
            threading.Thread(target=self._work, name=f"eyas-read-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        error: BaseException | None = None
        num_running = count
        while num_running:
            told = self._told.get()
            if told is None:
                num_running -= 1
            elif isinstance(told, BaseException):
                error = error or told
                self._stop()
            elif error is None:
                try:
                    on_read(*told)
                except BaseException as raised:  # raised again when the threads have ended
                    error = raised
                    self._stop()
        for thread in threads:
            thread.join()
        if error is not None:
            raise error

    def _next(self) -> _Piece | None:
        with self._lock:
            return next(self._pieces, None)

    def _stop(self) -> None:
        with self._lock:
            self._pieces = iter(())

    def _work(self) -> None:
        try:
            with torch.inference_mode(self._inference):
                reader = _reader(self._device, self._ready)
                while (piece := self._next()) is not None:
                    reader.read(piece, self._files[piece.job.file])
                    self._told.put((piece.job.name, piece.num_bytes))
                reader.finish()
        except BaseException as error:  # raised again where `run` was called
            self._told.put(error)
        self._told.put(None)


class _HostReader:
    """Reads into memory of the host."""

    def __init__(self) -> None:
        self._buffer_B = torch.empty(PIECE_BYTES["cpu"], dtype=torch.uint8)

    def read(self, piece: _Piece, descriptor: int) -> None:
        """One piece, into its parameter; by way of a buffer if it must be converted."""
        part = _part_of(piece)
        if piece.job.is_direct:
            _fill(part.view(torch.uint8), piece, descriptor)
            return
        stored_B = self._buffer_B[: piece.num_bytes]
        _fill(stored_B, piece, descriptor)
        part.copy_(stored_B.view(piece.job.dtype))

    def finish(self) -> None:
        """Nothing is under way when a read returns."""


class _DeviceReader:
    """Reads into pinned buffers, from which the device copies on a stream of this thread."""

    def __init__(self, device: torch.device, ready: torch.cuda.Event) -> None:
        torch.cuda.set_device(device)  # of this thread
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(ready)
        self._buffers = [
            torch.empty(PIECE_BYTES["cuda"], dtype=torch.uint8, pin_memory=True)
            for _ in range(_BUFFERS)
        ]
        self._copied: list[torch.cuda.Event] = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in range(_BUFFERS)
        ]
        self._turn = 0

    def read(self, piece: _Piece, descriptor: int) -> None:
        """Start the copy of one piece; its bytes have been read when this returns."""
        turn, self._turn = self._turn, (self._turn + 1) % _BUFFERS
        self._copied[turn].synchronize()  # the buffer's last content has left it
        staged_B = self._buffers[turn][: piece.num_bytes]
        _fill(staged_B, piece, descriptor)
        part = _part_of(piece)
        with torch.cuda.stream(self._stream):
            if piece.job.is_direct:
                part.view(torch.uint8).copy_(staged_B, non_blocking=True)
            else:
                stored_B = staged_B.to(part.device, non_blocking=True)
                part.copy_(stored_B.view(piece.job.dtype))
            self._copied[turn].record(self._stream)

    def finish(self) -> None:
        """Wait for the copies."""
        self._stream.synchronize()


def _reader(device: torch.device, ready: torch.cuda.Event | None) -> _HostReader | _DeviceReader:
    return _HostReader() if ready is None else _DeviceReader(device, ready)


def _part_of(piece: _Piece) -> Tensor:
    """The elements that a piece holds, one after the other, in the parameter."""
    job, size = piece.job, piece.job.dtype.itemsize
    assert job.destination.is_contiguous()
    first = piece.start // size
    return job.destination.view(-1)[first : first + piece.num_bytes // size]


def _fill(bytes_B: Tensor, piece: _Piece, descriptor: int) -> None:
    """Read a piece into memory of the host."""
    buffer: Any = bytes_B.numpy()
    memory, position = memoryview(buffer), 0
    job, start = piece.job, piece.job.offset + piece.start
    while position < len(memory):
        try:
            count = os.preadv(descriptor, [memory[position:]], start + position)
        except OSError as error:
            raise CheckpointError(f"{job.file} cannot be read: {error.strerror}") from None
        if not count:
            raise CheckpointError(
                f"{job.file} ended while {job.name} was read: did something write to it?"
            )
        position += count
