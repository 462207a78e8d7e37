"""A further rank: a process of its own which joins the others, loads its part and obeys (D10).

It is started as a program and not as a copy of its leader's, so that a script needs no guard around
its main part. Each side sees the other's end as the end of the pipe between them: a rank whose
leader is gone ends itself, whatever it is doing.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from eyas.comm.distributed import find_store, join
from eyas.config import EngineConfig
from eyas.engine.check_report import CheckReport
from eyas.engine.device import resolve_device
from eyas.engine.engine_process import ForwardLogs, Port
from eyas.models.sharding import Parallel

BEAT_SECONDS = 1.0


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
    """A rank has come to a phase: "joining" (its program runs), "loading" or "ready", with the
    attention that its trials have chosen."""

    phase: str
    backends: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RankBeat:
    """A sign of life, every BEAT_SECONDS. doing: the call that a rank is in, for `seconds`."""

    doing: str | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class RankFailed:
    """A rank raised; it is the last that it says."""

    error: str
    details: str


def main() -> None:
    """The life of a rank's process; its argument is the number of the pipe's descriptor."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the leader's to answer
        signal.signal(number, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    setup: RankSetup = connection.recv()
    port = Port(connection)
    logging.basicConfig(level=setup.log_level, handlers=[ForwardLogs(port)], force=True)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    life = _Life(setup, port)
    for target, arguments in ((port.read, (commands,)), (life.beat, ())):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    try:
        life.live(commands)
    except BaseException as error:
        port.send(RankFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        os._exit(1)
    # Not the usual exit: it would wait for threads and destructors of a broken device.
    os._exit(0)


class _Life:
    """Join, load, obey."""

    def __init__(self, setup: RankSetup, port: Port) -> None:
        self._setup, self._port = setup, port
        self._doing: tuple[str, float] | None = None

    def live(self, commands: queue.SimpleQueue[Any]) -> None:
        """Until told to stop."""
        from eyas.engine.load import build_worker, load_models  # which imports the leader's side

        setup = self._setup
        config, device = setup.config, resolve_device(setup.config.device)
        if device == "cuda":
            torch.cuda.set_device(setup.rank)
        else:
            torch.set_num_threads(setup.num_threads)
        self._port.send(RankReached("joining"))
        store = find_store(setup.port)
        group = join(store, rank=setup.rank, size=config.tensor_parallel_size, device=device)
        self._port.send(RankReached("loading"))
        parallel = Parallel(group, config.expert_parallel)
        models = load_models(config, setup.report, parallel=parallel)
        worker = build_worker(config, setup.report, models)
        self._port.send(RankReached("ready", tuple(worker.backends)))
        while (command := commands.get()) is not None:
            function, args, kwargs = command
            self._doing = function.__qualname__, time.monotonic()
            function(worker, *args, **kwargs)
            self._doing = None

    def beat(self) -> None:
        """In a thread: tell that this rank is there, and what it is doing."""
        while True:
            time.sleep(BEAT_SECONDS)
            doing, start = self._doing or (None, time.monotonic())
            self._port.send(RankBeat(doing, time.monotonic() - start))


if __name__ == "__main__":
    # The module under its own name: what it sends is known by that to the leader.
    from eyas.engine import rank_process

    rank_process.main()
