"""The engine in a process of its own (design D10): load, serve, die with one report.

Both sides hold one end of a pipe, so that each sees the other's end: a parent whose engine is
killed reads the end of the pipe, and an engine whose parent is gone ends itself. Signals that a
terminal sends to all processes are the parent's to answer: it tells the engine to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.engine.async_engine import EngineHandle
from eyas.engine.engine_loop import EngineLoop
from eyas.engine.messages import (
    Command,
    Ended,
    EngineInfo,
    LoadFailed,
    Logged,
    Progressed,
    Stop,
)
from eyas.models.embedded import Progress
from eyas.types import CheckError, EyasError, Finding

if TYPE_CHECKING:
    from eyas.engine.engine import Engine

_STOP_SECONDS = 5.0  # for the current step, before the process is killed


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a load brought beside the engine. folder: has the tokenizer. facts: lines to log."""

    info: EngineInfo
    folder: Path
    facts: tuple[str, ...] = ()
    warnings: tuple[Finding, ...] = ()


# Called in the engine's process, where it is imported: a function of a module, or a partial of one.
Loader = Callable[[Progress], tuple["Engine", Loaded]]


class LoadError(RuntimeError):
    """The load broke by a fault that is not the user's. details: the traceback, if there is one."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


class EngineProcess(EngineHandle):
    """An engine behind a pipe. `load` it inside the event loop that uses it; `stop` it always."""

    def __init__(self, load: Loader) -> None:
        super().__init__()
        context = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
        self._connection, self._other = context.Pipe()
        self._process = context.Process(
            target=_main,
            args=(self._other, load, logging.getLogger().level),
            name="eyas-engine",
        )
        self._outbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._loaded: asyncio.Future[Loaded] | None = None
        self._starting: asyncio.Future[None] | None = None
        self._progress: Progress | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """The process's id, once started."""
        return self._process.pid

    async def load(self, progress: Progress) -> Loaded:
        """Start the process and wait for its engine; progress is called in the event loop.

        Raises what the load raised: CheckError, EyasError, or LoadError for all else, the
        process's sudden end included.
        """
        self._loop, self._progress = asyncio.get_running_loop(), progress
        self._loaded = self._loop.create_future()
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        await asyncio.shield(self._starting)
        loaded = await asyncio.shield(self._loaded)
        self.info = loaded.info
        return loaded

    async def stop(self) -> None:
        """End the process after its current step, or at once while it loads; it is gone then."""
        self._is_stopping = True
        if self._starting is None:
            return
        await asyncio.gather(self._starting, return_exceptions=True)
        if self._process.pid is None:  # it could not be started
            return
        if self._loaded is None or not self._loaded.done():
            self._process.kill()
        self._send(Stop())
        try:
            await asyncio.wait_for(self._gone.wait(), _STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._gone.wait()
        self._outbox.put(None)

    def _start(self) -> None:
        """In a thread, for it takes a while; whoever cancels the load must wait for it."""
        self._process.start()
        self._other.close()  # so that the end of the process is the end of the pipe
        for target in (self._read, self._write):
            threading.Thread(target=target, name="eyas-pipe", daemon=True).start()

    def _send(self, command: Command) -> None:
        self._outbox.put(command)

    def _write(self) -> None:
        """In a thread: a full pipe must not stop the event loop."""
        with contextlib.suppress(OSError):  # the reader tells of the end
            while (command := self._outbox.get()) is not None:
                self._connection.send(command)

    def _read(self) -> None:
        try:
            while True:
                self._in_loop(self._take, self._connection.recv())
        except (EOFError, OSError):
            self._process.join()  # here alone: two waits for one process confuse each other
        except Exception as error:  # half a message, at a sudden end
            logging.getLogger(__name__).error("the engine's pipe broke: %r", error)
            self._process.kill()
            self._process.join()
        self._in_loop(self._process_ended)

    def _in_loop(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def _take(self, event: Any) -> None:
        assert self._loaded is not None
        if isinstance(event, Progressed):
            assert self._progress is not None
            self._progress(event.step, event.done, event.total)
        elif isinstance(event, Logged):
            logging.getLogger(event.logger).log(event.level, "%s", event.text)
        elif isinstance(event, Loaded | LoadFailed):
            if self._loaded.done():
                return
            if isinstance(event, Loaded):
                self._loaded.set_result(event)
            else:
                self._loaded.set_exception(_load_error(event))
        else:
            self._receive(event)

    def _process_ended(self) -> None:
        reason = _exit_text(self._process.exitcode)
        assert self._loaded is not None
        if not self._loaded.done():
            self._loaded.set_exception(LoadError(reason))
            self._loaded.exception()  # whoever stopped the load does not ask for it
        self._end(Ended(reason, is_death=not self._is_stopping))
        self._connection.close()
        self._gone.set()


def _exit_text(code: int | None) -> str:
    assert code is not None
    if code >= 0:
        return f"the engine process ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
    return f"the engine process was killed by {name}{hint}"


def _load_error(event: LoadFailed) -> Exception:
    if event.findings:
        return CheckError(event.findings)
    return EyasError(event.text) if event.is_mistake else LoadError(event.text, event.details)


class Port:
    """The engine's end of the pipe; several threads send."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, event: object) -> None:
        """Send an event; a parent that is gone ends this process."""
        try:
            with self._lock:
                self._connection.send(event)
        except OSError:
            os._exit(1)

    def read(self, commands: queue.SimpleQueue[Command]) -> None:
        """Queue commands as they come; the end of the pipe ends this process."""
        try:
            while True:
                commands.put(self._connection.recv())
        except (EOFError, OSError):
            os._exit(1)


class ForwardLogs(logging.Handler):
    """Log lines go to the parent, which writes them in its format."""

    def __init__(self, port: Port) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._port = port

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record as plain text."""
        self._port.send(Logged(record.name, record.levelno, self.format(record)))


def _main(connection: Connection[Any, Any], load: Loader, log_level: int) -> None:
    """The life of the engine's process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    port = Port(connection)
    logging.basicConfig(level=log_level, handlers=[ForwardLogs(port)], force=True)
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=port.read, args=(commands,), daemon=True).start()
    try:
        engine, loaded = load(lambda step, done, total: port.send(Progressed(step, done, total)))
    except BaseException as error:
        port.send(_failure(error))
        os._exit(1)
    port.send(loaded)
    engine.worker.on_failure(functools.partial(_die, port))
    ended = EngineLoop(engine, commands, port.send).run()
    # Not the usual exit: it would wait for threads and destructors of a broken device.
    os._exit(1 if ended.is_death else 0)


def _die(port: Port, report: str) -> None:
    """Another rank has failed, and this process may wait for it for ever."""
    port.send(Ended(report.partition("\n")[0], is_death=True, details=report))
    os._exit(1)


def _failure(error: BaseException) -> LoadFailed:
    if isinstance(error, CheckError):
        return LoadFailed(str(error), True, error.findings)
    if isinstance(error, EyasError):
        return LoadFailed(str(error), True)
    text = f"{type(error).__name__}: {error}"
    return LoadFailed(text, False, details=traceback.format_exc())
