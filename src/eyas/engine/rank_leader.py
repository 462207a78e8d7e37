"""The other ranks' processes as rank 0 sees them: started, told, watched and ended (D10)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from eyas.comm.distributed import DistributedGroup, join, open_store
from eyas.comm.group import Group
from eyas.config import EngineConfig
from eyas.engine.check_report import CheckReport
from eyas.engine.device import resolve_device
from eyas.engine.messages import Logged
from eyas.engine.rank_process import BEAT_SECONDS, RankBeat, RankFailed, RankReached, RankSetup
from eyas.models.embedded import Progress
from eyas.types import EyasError

logger = logging.getLogger(__name__)

OnFailure = Callable[[str], None]

WATCHDOG_SECONDS = 60.0  # unless the settings say another number
_NUM_LAST_LINES = 20  # of a rank's stderr, kept for its report
_STOP_SECONDS = 5.0
_GRACE_SECONDS = 2.0  # between an error here and the news of another rank's
_SILENT_SECONDS = 3 * BEAT_SECONDS  # a rank that is silent for so long does not run
_WATCH_SECONDS = 0.25
_HINTS = {
    "SIGKILL": "the system does that when memory runs out: lower --max-batch-size, "
    "--kv-cache-tokens or --max-model-len, and look at the system's log",
    "OutOfMemoryError": "lower --max-batch-size, --kv-cache-tokens or --max-model-len",
}


class RankError(EyasError):
    """A rank failed or hangs: which one, where, in what phase, of what, and its last lines."""


@dataclasses.dataclass
class _Rank:
    """A process. phase: as it last said. failure: what it raised, if it could say so."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    phase: str = "starting"
    backends: tuple[str, ...] = ()
    failure: RankFailed | None = None
    is_gone: bool = False
    beat: RankBeat = RankBeat(None, 0.0)
    beat_time: float = dataclasses.field(default_factory=time.monotonic)
    lines: collections.deque[str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_NUM_LAST_LINES)
    )

    @property
    def name(self) -> str:
        """For reports."""
        return f"rank {self.number} (process {self.process.pid} on {socket.gethostname()})"

    def describe_end(self) -> str:
        """The report of its end: what, the traceback, its last lines, a hint."""
        phase = "serving" if self.phase == "ready" else self.phase
        code = self.process.poll()
        if self.failure is not None:
            what, details = self.failure.error, [self.failure.details.rstrip()]
        elif code is not None and code < 0:
            what, details = f"killed by {signal.Signals(-code).name}", []
        else:
            what, details = f"ended with exit code {code}", []
        return self._report(f"{self.name} failed while {phase}: {what}", details)

    def describe_hang(self, seconds: float) -> str:
        """The report of no progress."""
        silent = time.monotonic() - self.beat_time
        text = f"no progress for {seconds:.0f} s: {self.name} "
        if silent > _SILENT_SECONDS:
            text += f"has given no sign of life for {silent:.0f} s"
        elif self.beat.doing is not None:
            text += f"is in {self.beat.doing} since {self.beat.seconds:.0f} s"
        else:
            text += "waits for the first rank"
        return self._report(text, [])

    def _report(self, text: str, details: list[str]) -> str:
        if self.lines:
            details = [*details, "its last lines:", *(f"  {line}" for line in self.lines)]
        hints = [hint for sign, hint in _HINTS.items() if sign in text]
        return "\n".join([text, *details, *(f"hint: {hint}" for hint in hints)])


class _Crew:
    """The ranks, shared by the threads that watch them. failure: the report, once there is one.

    busy_since: when the first rank began what it is doing (its clock is time.monotonic).
    """

    def __init__(self, watchdog_seconds: float) -> None:
        self.news = threading.Condition()
        self.ranks: list[_Rank] = []
        self.failure: str | None = None
        self.busy_since: float | None = None
        self.on_failure: OnFailure | None = None
        self.is_stopping = False
        self._watchdog_seconds = watchdog_seconds

    def watch(self) -> None:
        """In a thread: until a rank fails or hangs, or all are to stop.

        All are killed then: what a rank that stands still owes the others frees them only so.
        """
        while not self.is_stopping and self.failure is None:
            with self.news:
                self.news.wait(_WATCH_SECONDS)
                self.failure = self._find_failure()
                self.news.notify_all()
        if self.failure is None or self.is_stopping:
            return
        for rank in self.ranks:
            rank.process.kill()
        if self.on_failure is not None:
            self.on_failure(self.failure)

    def _find_failure(self) -> str | None:
        gone = [rank for rank in self.ranks if rank.is_gone]
        said = [rank for rank in gone if rank.failure is not None]
        for rank in said or gone:  # one that said why before one that only went
            return rank.describe_end()
        since, limit = self.busy_since, self._watchdog_seconds
        if since is None or not limit or time.monotonic() - since < limit:
            return None
        quiet = max(self.ranks, key=lambda rank: time.monotonic() - rank.beat_time)
        return quiet.describe_hang(time.monotonic() - since)

    def raise_failure(self) -> None:
        """Raise RankError when a rank has failed."""
        if self.failure is not None:
            raise RankError(self.failure)


class RankProcesses:
    """The ranks above 0 of one model, as processes of this host; implements ranks.Followers."""

    def __init__(self, config: EngineConfig, report: CheckReport) -> None:
        self._size = config.tensor_parallel_size
        self._store = open_store()
        self._crew = crew = _Crew(WATCHDOG_SECONDS if config.watchdog is None else config.watchdog)
        self._end = weakref.finalize(self, _end, crew)
        num_threads = max(torch.get_num_threads() // self._size, 1)
        self._device = resolve_device(config.device)
        if self._device == "cpu":
            torch.set_num_threads(num_threads)
        level = logging.getLogger().level
        for number in range(1, self._size):
            rank = _start(number)
            crew.ranks.append(rank)
            setup = RankSetup(config, report, number, self._store.port, level, num_threads)
            for target in (_read, _read_lines):
                threading.Thread(target=target, args=(rank, crew.news), daemon=True).start()
            with contextlib.suppress(OSError):  # its end is seen by the reader
                rank.connection.send(setup)
        threading.Thread(target=crew.watch, daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes' ids, in order of rank."""
        return [rank.process.pid for rank in self._crew.ranks]

    def join(self) -> Group:
        """Meet the ranks, once their programs run. Raises RankError when one fails before."""
        self._wait_for("joining")
        joined: list[Group | Exception] = []

        def meet() -> None:
            try:
                if self._device == "cuda":
                    torch.cuda.set_device(0)
                joined.append(join(self._store, rank=0, size=self._size, device=self._device))
            except Exception as error:
                joined.append(error)
            with self._crew.news:
                self._crew.news.notify_all()

        # In a thread, as it cannot be called off when a rank is gone.
        threading.Thread(target=meet, daemon=True).start()
        with self._crew.news:
            self._crew.news.wait_for(lambda: joined or self._crew.failure)
        self._crew.raise_failure()
        (group,) = joined
        if isinstance(group, Exception):
            raise self.explain(group) from group
        if self._device == "cuda":
            torch.cuda.set_device(0)
        if isinstance(group, DistributedGroup):  # where nobody else watches: free who waits
            self.on_failure(lambda _: group.abort())
        return group

    def wait_ready(self, backends: Sequence[str]) -> None:
        """Wait until all ranks have loaded. Raises RankError when one fails, or would attend in
        another way than this rank (`backends`): they would not meet in their collectives."""
        self._wait_for("ready")
        for rank in self._crew.ranks:
            if rank.backends != tuple(backends):
                raise RankError(
                    f"{rank.name} has chosen {', '.join(rank.backends)} for attention where rank 0 "
                    f"has {', '.join(backends)}: its log says why; use --attention-backend torch"
                )

    def _wait_for(self, phase: str) -> None:
        crew = self._crew
        with crew.news:
            crew.news.wait_for(lambda: crew.failure or all(r.phase == phase for r in crew.ranks))
        crew.raise_failure()

    def on_failure(self, tell: OnFailure) -> None:
        """See ranks.Followers."""
        self._crew.on_failure = tell

    def checked(self, progress: Progress | None) -> Progress:
        """A callback for progress of this rank that raises RankError when another has failed."""

        def report(step: str, done: int, total: int) -> None:
            self._crew.raise_failure()
            if progress is not None:
                progress(step, done, total)

        return report

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """See ranks.Followers."""
        self._crew.busy_since = time.monotonic()
        try:
            yield
        finally:
            self._crew.busy_since = None

    def tell(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """See ranks.Followers. Raises RankError when a rank has failed."""
        self._crew.raise_failure()
        message = pickle.dumps((function, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        for rank in self._crew.ranks:
            with contextlib.suppress(OSError):  # the reader tells of the end
                rank.connection.send_bytes(message)

    def explain(self, error: Exception) -> Exception:
        """See ranks.Followers: a rank that goes breaks the others' collectives first."""
        crew = self._crew
        with crew.news:
            crew.news.wait_for(lambda: crew.failure, _GRACE_SECONDS)
        return error if crew.failure is None else RankError(crew.failure)

    def stop(self) -> None:
        """End the ranks, after what they were told; they are gone then."""
        self._end()


def _end(crew: _Crew) -> None:
    crew.is_stopping = True
    for rank in crew.ranks:
        with contextlib.suppress(OSError):
            rank.connection.send_bytes(pickle.dumps(None))
    # One that hangs, or waits for one that is gone, does not hear of it.
    deadline = time.monotonic() + (0.0 if crew.failure else _STOP_SECONDS)
    for rank in crew.ranks:
        try:
            rank.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()


def _start(number: int) -> _Rank:
    ours, theirs = multiprocessing.Pipe()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "eyas.engine.rank_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
    return _Rank(number, process, ours)


def _read(rank: _Rank, news: threading.Condition) -> None:
    """In a thread: what a rank says, until its end."""
    with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        while True:
            event = rank.connection.recv()
            if isinstance(event, Logged):
                text = f"rank {rank.number}: {event.text}"
                logging.getLogger(event.logger).log(event.level, "%s", text)
                rank.lines.append(event.text)
                continue
            with news:
                _take(rank, event)
                news.notify_all()
    with contextlib.suppress(subprocess.TimeoutExpired):
        rank.process.wait(_STOP_SECONDS)
    with news:
        rank.is_gone = True
        news.notify_all()


def _take(rank: _Rank, event: object) -> None:
    rank.beat_time = time.monotonic()
    if isinstance(event, RankBeat):
        rank.beat = event
    elif isinstance(event, RankReached):
        rank.phase, rank.backends = event.phase, event.backends
    elif isinstance(event, RankFailed):
        rank.failure = event


def _read_lines(rank: _Rank, news: threading.Condition) -> None:
    """In a thread: what a rank writes to stderr goes to the log, and its last lines are kept."""
    assert rank.process.stderr is not None
    with rank.process.stderr as lines:
        for raw in lines:
            line = raw.decode(errors="replace").rstrip()
            rank.lines.append(line)
            logger.info("rank %d: %s", rank.number, line)
