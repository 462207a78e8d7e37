"""The engine behind a thread, for asyncio callers: submit, stream, abort.

The thread owns the engine; callers reach it through a queue of commands that is read before each
step. A request that the engine refuses fails alone; an exception in a step ends everything, with
its text on every open stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from eyas.types import EyasError, SamplingParams, StepOutput

if TYPE_CHECKING:  # the engine brings torch along, which a client of it can do without
    from eyas.engine.engine import Engine


class EngineDeadError(RuntimeError):
    """The engine has ended; the text says why."""


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """What the engine held after its last step or command.

    num_running: requests in a slot (in prefill or decoding); num_waiting: queued ones. num_pages:
    KV pages that requests can have; num_free_pages of them are free.
    """

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int


class RequestStream:
    """Outputs of one accepted request, in order: an asynchronous iterator.

    It ends after the output with a finish reason and raises EngineDeadError if the engine ends
    first. Whoever holds it must `close` it: that aborts what still runs.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._queue: asyncio.Queue[StepOutput | Exception | None] = asyncio.Queue()
        self._ended = False

    def put(self, item: StepOutput | Exception | None) -> None:
        """Deliver an output, an error, or None for "accepted"; from the event loop's thread."""
        self._queue.put_nowait(item)

    async def accepted(self) -> None:
        """Wait for the engine's verdict. Raises EyasError or EngineDeadError."""
        verdict = await self._queue.get()
        if isinstance(verdict, Exception):
            raise verdict
        assert verdict is None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            self._ended = True
            raise item
        assert item is not None
        self._ended = item.finish_reason is not None
        return item

    def close(self) -> None:
        """Abort the request if it still runs: its slot and pages become free. May be repeated."""
        self._ended = True
        self._close()


class AsyncEngine:
    """Runs an Engine in a thread of its own. Call `start` inside the event loop that uses it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._thread = threading.Thread(target=self._run, name="eyas-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: str | None = None
        self._died = asyncio.Event()
        self._status = self._read_status()

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self._engine.max_model_len

    @property
    def error(self) -> str | None:
        """Why the engine has ended, None while it lives."""
        return self._error

    def status(self) -> EngineStatus:
        """What the engine held after its last step or command."""
        return self._status

    def start(self) -> None:
        """Start the thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step; open streams raise EngineDeadError."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def died(self) -> str:
        """Wait until the engine dies of an exception, and say which. `stop` is no such end."""
        await self._died.wait()
        assert self._error is not None
        return self._error

    async def submit(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> RequestStream:
        """Queue a request; returns once the engine has accepted it, before any output.

        Raises EyasError if the engine refuses the request and EngineDeadError if it has ended.
        """
        if self._error is not None:
            raise EngineDeadError(self._error)
        if request_id in self._streams:
            raise EyasError(f"request id {request_id!r} is in use")
        stream = RequestStream(lambda: self._close(request_id))
        self._streams[request_id] = stream
        self._commands.put(lambda: self._add(request_id, prompt_token_ids, params))
        try:
            await stream.accepted()
        except BaseException:  # a caller that gives up while it waits is one that leaves
            stream.close()
            raise
        return stream

    def _close(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._commands.put(lambda: self._engine.abort(request_id))

    def _add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        try:
            self._engine.add(request_id, prompt, params)
        except Exception as error:  # whatever it is, it concerns this request alone
            self._call_in_loop(self._put, request_id, error)
        else:
            self._call_in_loop(self._put, request_id, None)

    def _run(self) -> None:
        try:
            while self._obey():
                outputs = self._engine.step()
                self._status = self._read_status()
                if outputs:
                    self._call_in_loop(self._put_all, outputs)
        except Exception as error:  # whatever it is, clients must hear of it
            self._call_in_loop(self._end, f"{type(error).__name__}: {error}", True)
            raise

    def _obey(self) -> bool:
        """Carry out commands; waits for one where there is nothing to do. False: stop."""
        while not self._engine.has_work or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                self._call_in_loop(self._end, "the server is shutting down", False)
                return False
            command()
            self._status = self._read_status()
        return True

    def _read_status(self) -> EngineStatus:
        scheduler = self._engine.scheduler
        return EngineStatus(
            num_running=len(scheduler.admitted),
            num_waiting=len(scheduler.waiting),
            num_free_pages=scheduler.allocator.num_free,
            num_pages=scheduler.allocator.num_usable,
        )

    def _call_in_loop(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _end(self, text: str, is_death: bool) -> None:
        self._error = text
        if is_death:
            self._died.set()
        for stream in self._streams.values():
            stream.put(EngineDeadError(text))

    def _put_all(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            self._put(output.request_id, output)

    def _put(self, request_id: str, item: StepOutput | Exception | None) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:  # the client may have left
            stream.put(item)
