"""Further ranks as processes of this host, one each, told what to do through pipes (design D10).

A process is started as a program of its own and not as a copy of this one, so that a script needs
no guard around its main part. Each side sees the other's end as the end of the pipe: a rank whose
leader is gone ends itself, whatever it is doing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from eyas.comm.distributed import find_store, join, open_store
from eyas.comm.group import Group
from eyas.config import EngineConfig
from eyas.engine.check_report import CheckReport
from eyas.engine.device import resolve_device
from eyas.engine.engine_process import ForwardLogs, Port
from eyas.engine.messages import Logged
from eyas.models.sharding import Parallel
from eyas.types import EyasError

logger = logging.getLogger(__name__)

_NUM_LAST_LINES = 20  # of a rank's stderr, kept for its report
_STOP_SECONDS = 5.0
_GRACE_SECONDS = 2.0  # between an error here and the news of another rank's


class RankError(EyasError):
    """A rank failed: which one, in what phase, of what, and its last lines."""


@dataclasses.dataclass(frozen=True)
class RankSetup:
    """What a rank needs to begin. port: where the ranks meet. report: of the check, which is not
    repeated."""

    config: EngineConfig
    report: CheckReport
    rank: int
    port: int
    log_level: int
    num_threads: int


@dataclasses.dataclass(frozen=True)
class RankReached:
    """A rank has come to a phase: "started" (it is about to join the others) or "ready"."""

    phase: str


@dataclasses.dataclass(frozen=True)
class RankFailed:
    """A rank raised; it is the last that it says."""

    phase: str
    error: str
    details: str


@dataclasses.dataclass
class _Rank:
    """What the leader knows of a rank. failure: why it is gone, or None."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    phase: str = "starting"
    failure: RankFailed | None = None
    is_gone: bool = False
    lines: collections.deque[str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_NUM_LAST_LINES)
    )

    def describe(self) -> str:
        """The report of its end."""
        failure = self.failure
        code = self.process.poll()
        text = f"rank {self.number} (process {self.process.pid}) failed while {self.phase}: "
        if failure is not None:
            text += failure.error
        elif code is not None and code < 0:
            text += f"killed by {signal.Signals(-code).name}"
        else:
            text += f"ended with exit code {code}"
        details = [failure.details.rstrip()] if failure is not None and failure.details else []
        if self.lines:
            details += ["its last lines:", *(f"  {line}" for line in self.lines)]
        return "\n".join([text, *details])


class RankProcesses:
    """The ranks above 0 of one model; implements ranks.Followers."""

    def __init__(self, config: EngineConfig, report: CheckReport) -> None:
        self._size = config.tensor_parallel_size
        self._store = open_store()
        self._news = threading.Condition()
        self._ranks: list[_Rank] = []
        self._end = weakref.finalize(self, _end, self._ranks)
        num_threads = max(torch.get_num_threads() // self._size, 1)
        self._device = resolve_device(config.device)
        if self._device == "cpu":
            torch.set_num_threads(num_threads)
        level = logging.getLogger().level
        for number in range(1, self._size):
            rank = _start(number)
            self._ranks.append(rank)
            setup = RankSetup(config, report, number, self._store.port, level, num_threads)
            for target in (_read, _read_lines):
                threading.Thread(target=target, args=(rank, self._news), daemon=True).start()
            with contextlib.suppress(OSError):  # its end is seen by the reader
                rank.connection.send(setup)

    def join(self) -> Group:
        """Meet the ranks, once their programs run. Raises RankError when one fails before."""
        self._wait_for("started")
        if self._device == "cuda":
            torch.cuda.set_device(0)
        try:
            return join(self._store, rank=0, size=self._size, device=self._device)
        except RuntimeError as error:
            raise self.explain(error) from error

    def wait_ready(self) -> None:
        """Wait until all ranks have loaded. Raises RankError when one fails."""
        self._wait_for("ready")

    def _wait_for(self, phase: str) -> None:
        with self._news:
            self._news.wait_for(
                lambda: self._failed() or all(r.phase == phase for r in self._ranks)
            )
        self._raise_failure()

    def _failed(self) -> _Rank | None:
        """The first rank that failed: one that said why before one that only went."""
        gone = [rank for rank in self._ranks if rank.is_gone]
        said = [rank for rank in gone if rank.failure is not None]
        return next(iter(said or gone), None)

    def _raise_failure(self) -> None:
        failed = self._failed()
        if failed is not None:
            raise RankError(failed.describe())

    def tell(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """See ranks.Followers. Raises RankError when a rank has failed."""
        self._raise_failure()
        message = pickle.dumps((function, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # the reader tells of the end
                rank.connection.send_bytes(message)

    def explain(self, error: Exception) -> Exception:
        """See ranks.Followers: a rank that goes breaks the others' collectives first."""
        deadline = time.monotonic() + _GRACE_SECONDS
        with self._news:
            while (left := deadline - time.monotonic()) > 0 and self._failed() is None:
                self._news.wait(left)
        failed = self._failed()
        return error if failed is None else RankError(failed.describe())

    def stop(self) -> None:
        """End the ranks, after what they were told; they are gone then."""
        self._end()


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.connection.send_bytes(pickle.dumps(None))
    deadline = time.monotonic() + _STOP_SECONDS
    for rank in ranks:
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
                logging.getLogger(event.logger).log(
                    event.level, "rank %d: %s", rank.number, event.text
                )
                continue
            with news:
                if isinstance(event, RankReached):
                    rank.phase = event.phase
                elif isinstance(event, RankFailed):
                    rank.failure, rank.phase = event, event.phase
                news.notify_all()
    with contextlib.suppress(subprocess.TimeoutExpired):
        rank.process.wait(_STOP_SECONDS)
    with news:
        rank.is_gone = True
        news.notify_all()


def _read_lines(rank: _Rank, news: threading.Condition) -> None:
    """In a thread: what a rank writes to stderr goes to the log, and its last lines are kept."""
    assert rank.process.stderr is not None
    with rank.process.stderr as lines:
        for raw in lines:
            line = raw.decode(errors="replace").rstrip()
            rank.lines.append(line)
            logger.info("rank %d: %s", rank.number, line)


def main() -> None:
    """The life of a rank's process; its argument is the number of the pipe's descriptor."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the leader's to answer
        signal.signal(number, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    setup: RankSetup = connection.recv()
    port = Port(connection)
    logging.basicConfig(level=setup.log_level, handlers=[ForwardLogs(port)], force=True)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=port.read, args=(commands,), daemon=True).start()
    life = _Life(setup, port)
    try:
        life.live(commands)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        port.send(RankFailed(life.phase, text, traceback.format_exc()))
        os._exit(1)
    # Not the usual exit: it would wait for threads and destructors of a broken device.
    os._exit(0)


class _Life:
    """Join, load, obey."""

    def __init__(self, setup: RankSetup, port: Port) -> None:
        self._setup, self._port, self.phase = setup, port, "starting"

    def live(self, commands: queue.SimpleQueue[Any]) -> None:
        """Until told to stop."""
        from eyas.engine.load import build_worker, load_models  # which imports this module

        setup = self._setup
        config, device = setup.config, resolve_device(setup.config.device)
        if device == "cuda":
            torch.cuda.set_device(setup.rank)
        else:
            torch.set_num_threads(setup.num_threads)
        self._port.send(RankReached("started"))
        store = find_store(setup.port)
        group = join(store, rank=setup.rank, size=config.tensor_parallel_size, device=device)
        self.phase = "loading"
        models = load_models(config, setup.report, parallel=Parallel(group, config.expert_parallel))
        worker = build_worker(config, setup.report, models)
        self.phase = "serving"
        self._port.send(RankReached("ready"))
        while (command := commands.get()) is not None:
            function, args, kwargs = command
            function(worker, *args, **kwargs)


if __name__ == "__main__":
    # The module under its own name: what it sends is known by that to the leader.
    from eyas.engine import rank_process

    rank_process.main()
