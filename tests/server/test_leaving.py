"""Clients that leave a real engine: slot and pages are free within two rounds, whatever runs."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.asgi import Connection
from fixtures.http_server import Server
from fixtures.served_engine import VOCAB, slow
from fixtures.tiny import llama_config, make_engine, tiny_target, worker_shape

from eyas.engine.async_engine import AsyncEngine
from eyas.engine.engine import Engine
from eyas.engine.tokenizer import Tokenizer
from eyas.scheduler.scheduler import Phase

STEP_SECONDS = 0.02  # far longer than it takes to say that a client has left
CHUNK = 16
LONG = [7] * (4 * CHUNK)  # four chunks of prompt


class Watched:
    """A slow engine that counts its steps, and notes at which of them requests were left."""

    def __init__(self) -> None:
        target = tiny_target(llama_config(vocab_size=VOCAB, num_layers=2))
        shape = worker_shape(num_slots=3)
        self.engine = slow(make_engine(target, shape=shape, chunk_tokens=CHUNK), STEP_SECONDS)
        self.num_steps, self.aborted_at = 0, list[int]()
        step, abort = self.engine.step, self.engine.abort

        def counted_step() -> Any:
            self.num_steps += 1
            return step()

        def noted_abort(request_id: str) -> None:
            if request_id in self.engine.requests:
                self.aborted_at.append(self.num_steps)
            abort(request_id)

        self.engine.step = counted_step  # type: ignore[method-assign]
        self.engine.abort = noted_abort  # type: ignore[method-assign]


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": LONG, "max_tokens": 60, "ignore_eos": True} | fields).encode()


def in_second_chunk(engine: Engine) -> bool:
    return any(
        request.phase is not Phase.RUNNING and CHUNK <= request.num_computed < len(LONG)
        for request in engine.requests.values()
    )


def decoding(engine: Engine) -> bool:
    return any(len(request.output_token_ids) > 3 for request in engine.requests.values())


def queued(engine: Engine) -> bool:
    return bool(engine.scheduler.waiting)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("when", "n", "others"),
    [
        (in_second_chunk, 1, 0),
        (in_second_chunk, 2, 0),
        (decoding, 1, 0),
        (decoding, 2, 0),
        (queued, 1, 3),
        (queued, 2, 3),
    ],
)
def test_slot_and_pages_are_free_within_two_rounds(
    tokenizer: Tokenizer, when: Callable[[Engine], bool], n: int, others: int, stream: bool
) -> None:
    watched = Watched()
    engine = watched.engine

    async def test() -> None:
        running = AsyncEngine(engine)
        running.start()
        server = Server(running, tokenizer)  # type: ignore[arg-type]
        path = "/v1/completions"
        stay = [Connection(server, path, body(prompt=[i], n=1)) for i in range(others)]
        async with asyncio.timeout(20):
            while len(engine.scheduler.admitted) < others:
                await asyncio.sleep(0.001)
            leaving = Connection(server, path, body(stream=stream, n=n))
            while len(engine.requests) < others + n or not when(engine):
                await asyncio.sleep(0.001)
            left_at = watched.num_steps
            leaving.leave()
            await leaving.task
            while len(watched.aborted_at) < n:
                await asyncio.sleep(0.001)
            assert max(watched.aborted_at) - left_at <= 2
            assert len(engine.requests) == others
            for connection in stay:
                connection.leave()
            while (status := running.status()).num_running or status.num_waiting:
                await asyncio.sleep(0.001)
        assert status.num_free_pages == status.num_pages
        await running.stop()

    asyncio.run(test())
