"""The life of the server: port, phases, signals, exit codes; with a tiny engine in its thread."""

import asyncio
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures.served_engine import VOCAB, ThreadEngine, slow
from fixtures.tiny import llama_config, make_engine, tiny_target

from eyas.config import ConfigError, EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.engine_process import Loaded, Loader, LoadError
from eyas.models.embedded import Progress
from eyas.server import launch
from eyas.server.formats import ModelCard
from eyas.server.launch import ServerSettings, run_server, serve
from eyas.types import CheckError, EyasError, Finding, Severity, StepOutput

CARD = ModelCard("tiny", 1700000000, "fp")
LONG = {"prompt": [1], "max_tokens": 300, "stream": True, "temperature": 0}


class Life:
    """A running server: a client for it and its exit code to come."""

    def __init__(self, client: httpx.AsyncClient, code: "asyncio.Task[int]") -> None:
        self.client, self.code = client, code

    async def health_is(self, status: str) -> httpx.Response:
        """Wait for a phase, from the moment that the port is bound."""
        async with asyncio.timeout(30):
            while True:
                response = await self.client.get("/health")
                if response.json()["status"] == status:
                    return response
                await asyncio.sleep(0.01)


@asynccontextmanager
async def life(load: Loader) -> AsyncIterator[Life]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = ServerSettings(port=port)
    code = asyncio.ensure_future(run_server(ThreadEngine(load), CARD, settings))
    await asyncio.sleep(0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        try:
            yield Life(client, code)
        finally:
            if not code.done():
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(code, 30)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def body() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(body())


def tiny() -> Engine:
    return make_engine(tiny_target(llama_config(vocab_size=VOCAB)))


@pytest.fixture
def load_tiny(tokenizer_folder: Path) -> Callable[..., Loader]:
    """A loader of a tiny engine; `hold` is waited for first."""

    def make(engine: Engine | None = None, hold: threading.Event | None = None) -> Loader:
        made = engine or tiny()

        def load(progress: Progress) -> tuple[Engine, Loaded]:
            progress("loading target", 5, 10)
            if hold is not None:
                hold.wait(10)
            progress("loading target", 10, 10)
            return made, Loaded(made.info, tokenizer_folder)

        return load

    return make


def test_a_life_from_loading_to_the_signal(load_tiny: Callable[..., Loader]) -> None:
    hold = threading.Event()

    async def test() -> None:
        async with life(load_tiny(hold=hold)) as server:
            loading = await server.health_is("loading")
            assert loading.json()["detail"] == "loading target: 50 %"
            assert loading.status_code == 503
            assert (await server.client.get("/v1/models")).status_code == 503
            hold.set()
            await server.health_is("ready")
            answer = await server.client.post(
                "/v1/completions", json={"prompt": [1, 2], "max_tokens": 5}
            )
            assert answer.json()["usage"]["completion_tokens"] == 5
            os.kill(os.getpid(), signal.SIGTERM)
            assert await server.code == 0
            with pytest.raises(httpx.ConnectError):
                await server.client.get("/health")

    run(test)


@pytest.mark.parametrize("more", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed(
    load_tiny: Callable[..., Loader], stream: bool, more: bytes
) -> None:
    """By the server as it is, over a socket; also one that has sent its next request already."""
    engine = slow(tiny())

    async def test() -> None:
        async with life(load_tiny(engine)) as server:
            await server.health_is("ready")
            body = json.dumps(LONG | {"stream": stream}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            _, writer = await asyncio.open_connection("127.0.0.1", server.client.base_url.port)
            writer.write(head.encode() + body + more)
            while not engine.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert engine.requests
            writer.close()
            async with asyncio.timeout(1):
                while engine.requests:
                    await asyncio.sleep(0.01)

    run(test)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_may_end_after_a_signal(
    load_tiny: Callable[..., Loader], number: signal.Signals
) -> None:
    async def test() -> None:
        async with life(load_tiny()) as server:
            await server.health_is("ready")
            async with server.client.stream("POST", "/v1/completions", json=LONG) as response:
                lines = response.aiter_lines()
                await anext(lines)
                os.kill(os.getpid(), number)
                await asyncio.sleep(0)
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert await server.code == 0

    run(test)


def test_a_second_signal_ends_open_streams_with_an_error(load_tiny: Callable[..., Loader]) -> None:
    async def test() -> None:
        engine = slow(tiny())
        async with life(load_tiny(engine)) as server:
            await server.health_is("ready")
            async with server.client.stream("POST", "/v1/completions", json=LONG) as response:
                lines = response.aiter_lines()
                await anext(lines)
                os.kill(os.getpid(), signal.SIGINT)
                await server.health_is("stopping")
                refused = await server.client.post("/v1/completions", json=LONG)
                assert refused.status_code == 503
                os.kill(os.getpid(), signal.SIGINT)
                rest = [line async for line in lines if line]
            error = json.loads(rest[-1].removeprefix("data: "))["error"]
            assert "shutting down" in error["message"]
            assert await server.code == 0

    run(test)


def test_a_dead_engine_ends_the_process_with_its_reason(
    load_tiny: Callable[..., Loader], caplog: pytest.LogCaptureFixture
) -> None:
    engine = slow(tiny())
    step, steps = engine.step, iter(range(100))

    def dies() -> list[StepOutput]:
        if next(steps) == 10:
            raise RuntimeError("rank 0 fell over")
        return step()

    engine.step = dies  # type: ignore[method-assign]

    async def test() -> None:
        async with life(load_tiny(engine)) as server:
            await server.health_is("ready")
            async with server.client.stream("POST", "/v1/completions", json=LONG) as response:
                lines = [line async for line in response.aiter_lines() if line]
            assert (
                "rank 0 fell over"
                in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
            )
            assert len(lines) > 1
            await asyncio.sleep(0.4)  # probes come now and then
            health = await server.health_is("failed")
            assert health.status_code == 503
            assert "RuntimeError: rank 0 fell over" in health.json()["detail"]
            assert await server.code == 1

    run(test)
    assert "the engine died: RuntimeError: rank 0 fell over" in caplog.text


def test_an_engine_that_dies_at_its_first_completion_is_never_ready(
    load_tiny: Callable[..., Loader], caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny()

    def dies() -> list[StepOutput]:
        raise RuntimeError("no kernel image")

    engine.step = dies  # type: ignore[method-assign]

    async def test() -> None:
        async with life(load_tiny(engine)) as server:
            assert await server.code == 1

    run(test)
    assert "the engine died at its first completion: RuntimeError: no kernel image" in caplog.text
    assert "ready: " not in caplog.text


FINDINGS = [
    Finding(Severity.ERROR, "width-mismatch", "pair", "2048 is not 4096", "use the right draft"),
    Finding(Severity.WARNING, "tokenizer-missing", "target", "no tokenizer"),
    Finding(Severity.ERROR, "layer-ids", "draft", "layer 40 of 32"),
]


@pytest.mark.parametrize(
    ("error", "code", "texts"),
    [
        (CheckError(FINDINGS), 2, ["width-mismatch: 2048", "layer 40", "no tokenizer"]),
        (EyasError("no such model"), 1, ["no such model"]),
        (RuntimeError("out of memory"), 1, ["the load failed", "RuntimeError: out of memory"]),
        (LoadError("killed", "in line 5"), 1, ["the load failed: killed\nin line 5"]),
    ],
    ids=["check", "mistake", "crash", "told"],
)
def test_a_failed_load_ends_the_process(
    error: BaseException, code: int, texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def load(progress: Progress) -> tuple[Engine, Loaded]:
        raise error

    async def test() -> None:
        async with life(load) as server:
            assert await server.code == code

    run(test)
    for text in texts:
        assert text in caplog.text


def test_a_port_in_use_is_a_mistake(caplog: pytest.LogCaptureFixture) -> None:
    def load(progress: Progress) -> tuple[Engine, Loaded]:
        raise AssertionError("nothing may be loaded")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = asyncio.run(run_server(ThreadEngine(load), CARD, ServerSettings(port=port)))
    assert code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_hosts(host: str) -> None:
    try:
        listener = launch._bind(host, 0)
    except OSError:
        if host == "::1":
            pytest.skip("no IPv6 here")
        raise
    with listener:
        url = launch._url(listener)
    assert url.startswith("http://[::1]:" if host == "::1" else "http://127.0.0.1:")


def test_a_folder_without_a_model_is_reported_in_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = EngineConfig(model=str(tmp_path))
    assert serve(config, ServerSettings(port=0)) == 2
    assert "config.json" in caplog.text
    assert "the check failed" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [{"host": ""}, {"served_model_name": ""}, {"api_keys": ("",)}, {"api_keys": ("a ",)}],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any]) -> None:
    """An empty host would open the server to every network, an empty key to everyone."""
    with pytest.raises(ConfigError, match="--(host|served-model-name|api-key) "):
        ServerSettings(**settings)


def test_the_fingerprint_is_stable_and_tells_models_apart() -> None:
    first = launch._fingerprint(EngineConfig(model="a"))
    assert first == launch._fingerprint(EngineConfig(model="a", draft="d"))
    assert first != launch._fingerprint(EngineConfig(model="b"))
    assert first != launch._fingerprint(EngineConfig(model="a", dtype="float32"))
