"""Bodies made to take long: they are answered quickly, and others do not wait for them."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.fake_engine import FakeEngine, says
from fixtures.http_server import Server

from eyas.engine.tokenizer import Tokenizer

MANY = 1_000_000
SECONDS = 4.0  # on a slow machine with neighbours; without the limits it was 10 to 50
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


MESSAGE = '{"role":"user","content":"a"}'


@pytest.mark.parametrize(
    ("path", "item", "count", "body", "param"),
    [
        (COMPLETE, "1", MANY, '{"prompt": [...], "n": 100}', None),
        (COMPLETE, "[1]", MANY, '{"prompt": [...]}', "prompt"),
        (COMPLETE, '"a"', MANY, '{"prompt": [...]}', "prompt"),
        (COMPLETE, '"a"', MANY, '{"prompt": "a", "stop_token_ids": [...]}', "stop_token_ids"),
        (COMPLETE, "1", MANY, '{"prompt": "a", "stop": [...]}', "stop"),
        (COMPLETE, '"x#": 1', MANY, '{"prompt": "a", "logit_bias": {...}}', "logit_bias"),
        (COMPLETE, '"x#": 1', MANY, "{...}", "x0"),
        (CHAT, MESSAGE, 200_000, '{"messages": [...]}', "messages"),
        ("/tokenize", "1", MANY, '{"messages": [...]}', "messages"),
        ("/detokenize", '"a"', MANY, '{"tokens": [...]}', "tokens[0]"),
        ("/detokenize", "1", 1_100_000, '{"tokens": [...]}', "tokens"),
    ],
)
def test_bodies_of_a_million_items(
    make_server: Callable[..., Server],
    path: str,
    item: str,
    count: int,
    body: str,
    param: str | None,
) -> None:
    items = ",".join(item.replace("#", str(number)) for number in range(count))
    server, data = make_server(FakeEngine(says([0]))), body.replace("...", items).encode()
    started = time.process_time()
    response = server.post(path, data)
    assert time.process_time() - started < SECONDS
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 1000


class Slow(Tokenizer):
    """Takes half a second for a long text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.__dict__ = tokenizer.__dict__

    def encode(self, text: str, **settings: Any) -> list[int]:
        if len(text) > 100:
            time.sleep(0.5)
        return super().encode(text[:100], **settings)


def test_a_long_text_makes_no_short_one_wait(tokenizer: Tokenizer) -> None:
    server, order = Server(FakeEngine(says([0])), Slow(tokenizer)), []

    async def ask(name: str, body: dict[str, Any]) -> None:
        response = await server.ask("POST", "/tokenize", content=json.dumps(body).encode())
        assert response.status_code == 200
        order.append(name)

    async def test() -> None:
        long = asyncio.create_task(ask("long", {"prompt": "a" * 60_000}))
        await asyncio.sleep(0.1)
        await ask("short", {"prompt": "a"})
        await long

    asyncio.run(test())
    assert order == ["short", "long"]


def test_texts_that_still_wait_at_the_end_are_answered(tokenizer: Tokenizer) -> None:
    server = Server(FakeEngine(says([0])), Slow(tokenizer))
    service = server.state.service()

    async def test() -> list[int]:
        body = json.dumps({"prompt": "a" * 60_000}).encode()
        asked = [server.ask("POST", "/tokenize", content=body) for _ in range(3)]
        tasks = [asyncio.ensure_future(one) for one in asked]
        await asyncio.sleep(0.1)
        service.close()
        return [response.status_code for response in await asyncio.gather(*tasks)]

    assert asyncio.run(test()) == [200, 503, 503]
