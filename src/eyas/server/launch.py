"""`eyas serve`: bind the port, have the engine's process check and load, answer until told to stop.

The port is bound before anything else, so that /ready can tell how far the start has come.
Exit codes: 0 stopped by a signal; 1 what was asked cannot be done (a port in use, no such model),
the load broke or the engine died; 2 the check has findings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import logging
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

from eyas import __version__
from eyas.config import ConfigError, EngineConfig
from eyas.engine.async_engine import EngineDeadError
from eyas.engine.engine_process import EngineProcess, Loaded, LoadError
from eyas.engine.library_logs import adopt_library_logs
from eyas.engine.serving_load import load_for_serving
from eyas.engine.tokenizer import Tokenizer
from eyas.models.embedded import Progress
from eyas.models.images import ImageLimits
from eyas.server.app import create_app
from eyas.server.engine_client import EngineClient
from eyas.server.formats import ModelCard
from eyas.server.images import ImageReader, body_limit
from eyas.server.log_format import LogFormat, configure_logging
from eyas.server.process import HttpServer, Stop, stop_on_signals
from eyas.server.service import Service
from eyas.server.state import ServerState
from eyas.types import CheckError, EyasError, SamplingParams

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_FINDINGS = 0, 1, 2
DRAIN_SECONDS = 10.0  # for running requests, after a signal
LINGER_SECONDS = 1.0  # a dead engine's reason stays readable on /health that long
_LOG_EVERY_SECONDS = 5.0
_LEAST_BYTES = 100_000  # what has less is counted in other things, such as graphs


class ServedEngine(EngineClient, Protocol):
    """An engine from its load to its end; EngineProcess has it."""

    death_details: str  # the traceback of its death

    async def load(self, progress: Progress) -> Loaded:
        """Load. Raises CheckError, EyasError or LoadError."""

    async def died(self) -> str:
        """Wait until it dies unasked, and say of what."""

    async def stop(self) -> None:
        """End it; open streams raise EngineDeadError."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server answers. port 0 takes a free one, which the log names. Raises ConfigError.

    served_model_name: what clients call the model; default config.model. api_keys: clients must
    bring one of them. drain_seconds: how long running requests have to end after a signal.
    image_limits: what is taken of images; allow_local_images: a folder that clients may name
    images of by file: URLs.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    log_format: LogFormat = "text"
    drain_seconds: float = DRAIN_SECONDS
    image_limits: ImageLimits = ImageLimits()
    allow_local_images: Path | None = None

    def __post_init__(self) -> None:
        if not self.host:  # to a socket it would mean every network
            raise ConfigError("--host is empty: write 127.0.0.1, or 0.0.0.0 for every network")
        if self.served_model_name == "":
            raise ConfigError("--served-model-name is empty: give a name, or leave it out")
        if any(not key or key != key.strip() for key in self.api_keys):
            raise ConfigError(
                "an --api-key is empty or has spaces around it: no client can send it"
            )


def serve(config: EngineConfig, settings: ServerSettings) -> int:
    """Run the server until a signal or a failure; returns the process's exit code.

    Logs to stderr unless logging is configured already.
    """
    configure_logging(settings.log_format)
    name = settings.served_model_name or config.model
    model = ModelCard(name, int(time.time()), _fingerprint(config))

    async def run() -> int:
        engine = EngineProcess(functools.partial(load_for_serving, config))
        return await run_server(engine, model, settings)

    return asyncio.run(run())


async def run_server(engine: ServedEngine, model: ModelCard, settings: ServerSettings) -> int:
    """Serve an engine that is still to be loaded; returns the exit code."""
    try:
        listener = _bind(settings.host, settings.port)
    except OSError as error:
        logger.error(
            "cannot listen on %s port %d: %s; choose others", settings.host, settings.port, error
        )
        return EXIT_FAILED
    state = ServerState()
    app = create_app(
        state,
        model,
        max_body_bytes=body_limit(settings.image_limits),
        api_keys=settings.api_keys,
    )
    http = HttpServer(app)
    url = _url(listener)
    logger.info("listening on %s; /ready tells when %s answers", url, model.name)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        with stop_on_signals() as stop:
            serving.add_done_callback(lambda _: stop.asked.set())  # it should not end by itself
            life = _Life(state, engine, stop, settings)
            code = await life.live(ready_text=f"{model.name} on {url}")
            http.force_exit = stop.at_once.is_set()
            return code
    finally:
        http.should_exit = True
        await serving


class _Life:
    """Load, serve until told to stop or the engine dies, end."""

    def __init__(
        self, state: ServerState, engine: ServedEngine, stop: Stop, settings: ServerSettings
    ) -> None:
        self._state, self._engine, self._stop = state, engine, stop
        self._settings = settings

    async def live(self, *, ready_text: str) -> int:
        """Returns the exit code; the engine has ended then."""
        starting = asyncio.ensure_future(self._start())
        try:
            if await _first(asyncio.wait({starting}), self._stop.asked.wait()) == 1:
                self._state.stop()
                starting.cancel()
                return EXIT_OK
            try:
                service = starting.result()
            except Exception as error:
                self._state.fail(str(error))
                return _report(error)
            self._state.become_ready(service)
            logger.info("ready: %s", ready_text)
            try:
                return await self._serve(service)
            finally:
                await self._engine.stop()  # what still runs gets an error event
                service.close()
        finally:
            await self._engine.stop()
            await asyncio.gather(starting, return_exceptions=True)

    async def _start(self) -> Service:
        """Load the engine, and this process's tokenizer beside it; show that an answer comes."""
        # It imports transformers, which takes as long as the load of a small model.
        importing = asyncio.create_task(asyncio.to_thread(adopt_library_logs))
        loaded = await self._engine.load(_ProgressLog(self._state).report)
        for fact in loaded.facts:
            logger.info("%s", fact)
        for finding in loaded.warnings:
            logger.warning("%s", finding)
        await importing
        images = ImageReader(self._settings.image_limits, self._settings.allow_local_images)
        tokenizer = await asyncio.to_thread(Tokenizer, loaded.folder)
        service = Service(self._engine, tokenizer, images)
        self._state.warm_up()
        try:
            await _warm_up(self._engine)
        except EngineDeadError as error:
            text = f"the engine died at its first completion: {error}"
            raise LoadError(text, self._engine.death_details) from error
        return service

    async def _serve(self, service: Service) -> int:
        """Until a signal or the engine's death; the exit code."""
        engine = self._engine
        if await _first(engine.died(), self._stop.asked.wait()) == 0:
            reason = f"the engine died: {engine.error}"
            self._state.fail(reason)
            logger.error("%s; ending%s", reason, _indented(engine.death_details))
            await asyncio.sleep(LINGER_SECONDS)
            return EXIT_FAILED
        self._state.stop()
        deadline = asyncio.sleep(self._settings.drain_seconds)
        await _first(_idle(service), self._stop.at_once.wait(), deadline, engine.died())
        return EXIT_OK


async def _warm_up(engine: EngineClient) -> None:
    """One short answer from prefill to its end. Raises what a client would meet."""
    room = engine.info.max_model_len - 1
    if room < 1:
        return  # every request will be refused, with the reason
    params = SamplingParams(max_tokens=min(4, room), temperature=0, ignore_eos=True)
    stream = await engine.submit("warm-up", [0], params)
    try:
        while (output := await stream.__anext__()).finish_reason is None:
            pass
        if output.error is not None:
            raise LoadError(f"the first completion failed: {output.error}")
    finally:
        stream.close()


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


class _ProgressLog:
    """Progress goes to the state and, now and then, to the log."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._last_step, self._last_log = state, "", 0.0

    def report(self, step: str, done: int, total: int) -> None:
        """`done` of `total` bytes (or of a few things) of a step are behind us."""
        self._state.report_progress(step, done, total)
        now = time.monotonic()
        if step != self._last_step or done == total or now - self._last_log > _LOG_EVERY_SECONDS:
            self._last_step, self._last_log = step, now
            if total > _LEAST_BYTES:
                logger.info("%s: %.0f of %.0f MB", step, done / 1e6, total / 1e6)
            else:
                logger.info("%s: %d of %d", step, done, total)


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait in its queue until the server takes them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _fingerprint(config: EngineConfig) -> str:
    """Changes with what may change answers; a draft does not."""
    chosen = json.dumps([__version__, config.model, config.dtype, config.device])
    return f"eyas-{hashlib.sha256(chosen.encode()).hexdigest()[:10]}"


def _report(error: Exception) -> int:
    """Say once why the start failed; the exit code."""
    if isinstance(error, CheckError):
        for finding in error.findings:
            logger.error("%s", finding)
        logger.error("the check failed: nothing was loaded")
        return EXIT_FINDINGS
    if isinstance(error, EyasError):
        logger.error("%s", error)
    elif isinstance(error, LoadError):
        logger.error("the load failed: %s%s", error, _indented(error.details))
    else:
        logger.error("the load failed", exc_info=error)
    return EXIT_FAILED


def _indented(details: str) -> str:
    return f"\n{details.rstrip()}" if details else ""
