"""`eyas serve`: bind the port, check, load, answer until told to stop.

The port is bound before anything else, so that /health can tell how far the start has come.
Exit codes: 0 stopped by a signal; 1 what was asked cannot be done (a port in use, no such model),
the load broke or the engine died; 2 the check has findings.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn

from eyas.config import EngineConfig
from eyas.engine.async_engine import AsyncEngine
from eyas.engine.tokenizer import Tokenizer
from eyas.models.embedded import Progress
from eyas.server.app import create_app
from eyas.server.formats import ModelCard
from eyas.server.service import Service
from eyas.server.state import Phase, ServerState
from eyas.types import CheckError, EyasError

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_FINDINGS = 0, 1, 2
DRAIN_SECONDS = 10.0  # for running requests, after a signal
LINGER_SECONDS = 1.0  # a dead engine's reason stays readable on /health that long
_CLOSE_SECONDS = 5  # for the last bytes of open responses
_LOG_EVERY_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a loader brings: an engine that is not started, and what goes with it."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    vocab_size: int


Loader = Callable[[Progress], Loaded]


def serve(config: EngineConfig, *, host: str, port: int, served_model_name: str | None) -> int:
    """Run the server until a signal or a failure; returns the process's exit code.

    served_model_name: what clients call the model; default config.model. port 0 takes a free one,
    which the log names. Logs to stderr unless logging is configured already.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    model = ModelCard(served_model_name or config.model, int(time.time()), _fingerprint(config))
    return asyncio.run(run_server(lambda p: _load(config, p), model, host=host, port=port))


async def run_server(load: Loader, model: ModelCard, *, host: str, port: int) -> int:
    """Serve what `load` brings (called in a thread of its own); returns the exit code."""
    try:
        listener = _bind(host, port)
    except OSError as error:
        logger.error("cannot listen on %s port %d: %s; choose others", host, port, error)
        return EXIT_FAILED
    state = ServerState()
    http = _HttpServer(create_app(state, model))
    url = _url(listener)
    logger.info("listening on %s; /health tells when %s is ready", url, model.name)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        with _stop_on_signals() as stop:
            serving.add_done_callback(lambda _: stop.asked.set())  # it should not end by itself
            code = await _live(state, load, stop=stop, ready_text=f"{model.name} on {url}")
            http.force_exit = stop.at_once.is_set()
            return code
    finally:
        http.should_exit = True
        await serving


async def _live(state: ServerState, load: Loader, *, stop: _Stop, ready_text: str) -> int:
    """Load, serve until told to stop or the engine dies, end."""
    loading = _Loading(load, state)
    if await _first(loading.done.wait(), stop.asked.wait()) == 1:
        state.stop()
        await loading.cancel()
        return EXIT_OK
    if loading.error is not None:
        state.fail(str(loading.error))
        return _report(loading.error)
    loaded = loading.loaded
    loaded.engine.start()
    service = Service(loaded.engine, loaded.tokenizer, vocab_size=loaded.vocab_size)
    state.become_ready(service)
    logger.info("ready: %s", ready_text)
    try:
        if await _first(loaded.engine.died(), stop.asked.wait()) == 0:
            reason = f"the engine died: {loaded.engine.error}"
            state.fail(reason)
            logger.error("%s; ending", reason)
            await asyncio.sleep(LINGER_SECONDS)
            return EXIT_FAILED
        state.stop()
        await _first(_idle(service), stop.at_once.wait(), asyncio.sleep(DRAIN_SECONDS))
        return EXIT_OK
    finally:
        await loaded.engine.stop()  # what still runs gets an error event
        service.close()


async def _idle(service: Service) -> None:
    """Wait until the engine has nothing to do."""
    while (status := service.engine.status()).num_running or status.num_waiting:
        await asyncio.sleep(0.05)


async def _first(*awaitables: Coroutine[Any, Any, Any]) -> int:
    """Wait for the first of them; its number. The others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return next(i for i, task in enumerate(tasks) if task in done)


class _Loading:
    """A load in a daemon thread. `done` is set when `loaded` or `error` is there."""

    def __init__(self, load: Loader, state: ServerState) -> None:
        self.done = asyncio.Event()
        self.error: BaseException | None = None
        self.loaded: Loaded
        self._load, self._state = load, state
        self._loop = asyncio.get_running_loop()
        self._last_step, self._last_log = "", 0.0
        self._thread = threading.Thread(target=self._run, name="eyas-load", daemon=True)
        self._thread.start()

    async def cancel(self) -> None:
        """Make the load end at its next progress report; does not wait for ever."""
        await asyncio.to_thread(self._thread.join, _CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self.loaded = self._load(self._progress)
        except BaseException as error:  # an exit in a thread would go unseen
            self.error = error
        with contextlib.suppress(RuntimeError):  # the loop may be gone: nobody waits any more
            self._loop.call_soon_threadsafe(self.done.set)

    def _progress(self, step: str, done: int, total: int) -> None:
        if self._state.phase is Phase.STOPPING:
            raise _LoadCancelledError
        self._state.report_progress(step, done, total)
        now = time.monotonic()
        if step != self._last_step or done == total or now - self._last_log > _LOG_EVERY_SECONDS:
            self._last_step, self._last_log = step, now
            logger.info("%s: %.0f of %.0f MB", step, done / 1e6, total / 1e6)


class _LoadCancelledError(Exception):
    """The server is to stop before it was ready."""


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: it would end the process by the signal."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone."""
        yield


@dataclasses.dataclass(frozen=True)
class _Stop:
    """asked: no new requests; at_once: do not wait for running ones either."""

    asked: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    at_once: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def on_signal(self) -> None:
        """A signal asks; one more does not wait."""
        if self.asked.is_set():
            self.at_once.set()
        else:
            logger.info("stopping when the running requests are done; once more to stop at once")
            self.asked.set()


@contextlib.contextmanager
def _stop_on_signals() -> Generator[_Stop, None, None]:
    """Events that SIGINT and SIGTERM set, where this is the main thread."""
    stop, loop = _Stop(), asyncio.get_running_loop()
    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    for number in signals:
        loop.add_signal_handler(number, stop.on_signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait in its queue until the server takes them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _fingerprint(config: EngineConfig) -> str:
    """Changes with what may change answers; a draft does not."""
    chosen = json.dumps([version("eyas"), config.model, config.dtype, config.device])
    return f"eyas-{hashlib.sha256(chosen.encode()).hexdigest()[:10]}"


def _load(config: EngineConfig, progress: Progress) -> Loaded:
    """Check, then load. Raises CheckError with all findings, EyasError for a missing tokenizer."""
    from eyas.engine.check import run_check
    from eyas.engine.load import load_engine, resolve_folders

    config = resolve_folders(config, progress=progress)
    try:
        tokenizer = Tokenizer(Path(config.model))
    except EyasError:
        run_check(config).raise_on_errors()  # where more is wrong, say it all
        raise
    loaded = load_engine(config, progress=progress)
    for label, text in loaded.report.facts.items():
        logger.info("%s: %s", label, text)
    for finding in loaded.report.findings:
        logger.warning("%s", finding)
    seconds = ", ".join(f"{stage} {time:.1f} s" for stage, time in loaded.seconds.items())
    logger.info("%s; %s", loaded.report.summary(), seconds)
    assert loaded.report.target is not None
    return Loaded(AsyncEngine(loaded.engine), tokenizer, loaded.report.target.vocab_size)


def _report(error: BaseException) -> int:
    """Say why the load failed; the exit code."""
    if isinstance(error, CheckError):
        for finding in error.findings:
            logger.error("%s", finding)
        logger.error("the check failed: nothing was loaded")
        return EXIT_FINDINGS
    if isinstance(error, EyasError):
        logger.error("%s", error)
    else:
        logger.error("the load failed", exc_info=error)
    return EXIT_FAILED
