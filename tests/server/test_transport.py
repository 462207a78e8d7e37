"""Long bodies and clients that leave, spoken to the application as a server would."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fixtures.asgi import Connection
from fixtures.fake_engine import HANG, FakeEngine, says
from fixtures.http_server import Server

from eyas.server import transport

MakeServer = Callable[..., Server]


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "a"}]} | fields).encode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def run(test: Awaitable[None]) -> None:
    async def body() -> None:
        await asyncio.wait_for(test, 10)

    asyncio.run(body())


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "before the first token", "between tokens"])
def test_leaving_aborts_at_once(make_server: MakeServer, when: str, stream: bool, n: int) -> None:
    engine = FakeEngine(says([0], [1], HANG) if when == "between tokens" else says(HANG, [1]))
    engine.hang_on_submit = when == "queued"

    async def test() -> None:
        connection = Connection(make_server(engine), CHAT, body(stream=stream, n=n))
        await until(lambda: len(engine.running) == n)
        await asyncio.sleep(0.02)
        if when == "between tokens" and stream:
            assert connection.text.count("data: ") == 3 * n
        assert not engine.aborted
        connection.leave()
        await until(lambda: not engine.running)
        await connection.task
        assert len(engine.aborted) == n

    run(test())


def test_a_client_that_stays_is_not_aborted(make_server: MakeServer) -> None:
    engine = FakeEngine(says([0], [1]))

    async def test() -> None:
        connection = Connection(make_server(engine), CHAT, body(stream=True))
        await connection.task
        assert connection.text.endswith("data: [DONE]\n\n")
        assert not engine.aborted

    run(test())


def test_leaving_while_the_prompt_is_tokenized_starts_nothing(make_server: MakeServer) -> None:
    engine = FakeEngine(says([0]))

    async def test() -> None:
        server = make_server(engine)
        connection = Connection(server, CHAT, body())
        connection.leave()
        await connection.task
        await asyncio.sleep(0.05)
        assert not engine.running

    run(test())


def test_a_client_that_does_not_finish_its_body(make_server: MakeServer) -> None:
    async def test() -> None:
        connection = Connection(make_server(FakeEngine(says([0]))), CHAT)
        connection.leave()
        await connection.task

    run(test())


@pytest.mark.parametrize("length", [101, "9" * 5000])
def test_a_declared_length_over_the_limit_is_refused_unread(
    make_server: MakeServer, length: int | str
) -> None:
    async def test() -> None:
        server = make_server(FakeEngine(says([0])), max_body_bytes=100)
        connection = Connection(server, CHAT, b"x" * 101, length=length)
        await connection.task
        assert connection.status == 413
        assert json.loads(connection.text)["error"]["code"] == "body_too_large"
        assert connection.num_parts_read == 0

    run(test())


@pytest.mark.parametrize("length", [None, 5])
def test_a_body_that_grows_over_the_limit_is_read_no_further(
    make_server: MakeServer, length: int | None
) -> None:
    async def test() -> None:
        server = make_server(FakeEngine(says([0])), max_body_bytes=100)
        connection = Connection(server, CHAT, *[b"x" * 40] * 50, length=length)
        await connection.task
        assert connection.status == 413
        assert connection.num_parts_read == 3

    run(test())


def test_a_body_of_just_the_limit_passes(make_server: MakeServer) -> None:
    whole = body()

    async def test() -> None:
        server = make_server(FakeEngine(says([0])), max_body_bytes=len(whole))
        connection = Connection(server, CHAT, whole[:7], whole[7:], length=len(whole))
        await connection.task
        assert connection.status == 200

    run(test())


def test_a_body_that_does_not_come(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "BODY_SECONDS", 0.05)

    async def test() -> None:
        connection = Connection(make_server(FakeEngine(says([0]))), CHAT)
        await connection.task
        assert connection.status == 408
        assert json.loads(connection.text)["error"]["code"] == "body_timeout"

    run(test())
