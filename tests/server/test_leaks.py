"""Many short requests, some left at any moment: nothing stays, with a real engine behind it."""

import asyncio
import gc
import json
import os
import random

import pytest
from fixtures.asgi import Connection
from fixtures.http_server import Server
from fixtures.served_engine import VOCAB
from fixtures.tiny import (
    assert_idle,
    draft_config,
    llama_config,
    make_engine,
    tiny_draft,
    tiny_target,
    worker_shape,
)

from eyas.config import TreeShape
from eyas.engine.async_engine import AsyncEngine
from eyas.engine.engine import Engine
from eyas.engine.tokenizer import Tokenizer

# A thousand in all three runs; set the variable for more in each.
NUM_REQUESTS = int(os.environ.get("EYAS_TEST_REQUESTS", "340"))
NUM_CLIENTS, NUM_WARM = 24, NUM_REQUESTS // 3
MAX_NEW_OBJECTS = NUM_REQUESTS // 3  # of the interpreter: half a one for each request after them


def small_engine(page_size: int) -> Engine:
    config = llama_config(vocab_size=VOCAB, num_layers=2)
    target = tiny_target(config)
    decoder = llama_config(vocab_size=VOCAB, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=10)
    draft = tiny_draft(target, draft_config(decoder, boundaries=(0, 1, 2)))
    shape = worker_shape(TreeShape(2, 1, 3), page_size=page_size, num_pages=1200 // page_size + 4)
    return make_engine(target, draft, shape, chunk_tokens=32, run_ahead=1)


def body(rng: random.Random) -> bytes:
    fields = {
        "prompt": [rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))],
        "max_tokens": rng.randint(1, 6),
        "n": rng.choice((1, 1, 1, 2)),
        "stream": rng.random() < 0.5,
        "logprobs": rng.choice((None, 1)),
        "stop": rng.choice((None, "e")),
        "seed": rng.randrange(100),
    }
    return json.dumps(fields).encode()


async def one(server: Server, rng: random.Random) -> bool:
    """One request; True if it was left before its end."""
    connection = Connection(server, "/v1/completions", body(rng))
    leaves = rng.random() < 0.35  # some of them are done before
    if leaves:
        for _ in range(rng.randint(0, 12)):
            await asyncio.sleep(rng.choice((0, 0.002)))
        connection.leave()
    left = not connection.task.done()
    await connection.task
    if not left and connection.sent:
        assert connection.status == 200, connection.text
    return leaves and left


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_nothing_is_left_of_a_thousand_requests(tokenizer: Tokenizer, page_size: int) -> None:
    engine, rng = small_engine(page_size), random.Random(page_size)
    engine.tokenizer = tokenizer

    async def test() -> tuple[int, int]:
        running = AsyncEngine(engine)
        running.start()
        server = Server(running, tokenizer)  # type: ignore[arg-type]
        todo, num_left, objects = iter(range(NUM_REQUESTS)), 0, 0

        async def client() -> None:
            nonlocal num_left, objects
            for number in todo:
                was_left = await one(server, rng)
                num_left += was_left
                if number == NUM_WARM:
                    gc.collect()
                    objects = len(gc.get_objects())

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        status = running.status
        async with asyncio.timeout(10):
            while (s := status()).num_running + s.num_waiting or s.num_free_pages != s.num_pages:
                await asyncio.sleep(0.01)
        assert not running._streams
        await running.stop()
        while engine.has_work:  # a last launch that nobody waits for
            engine.step()
        gc.collect()
        return num_left, len(gc.get_objects()) - objects

    num_left, num_new_objects = asyncio.run(test())
    assert 0.15 < num_left / NUM_REQUESTS < 0.55
    assert_idle(engine)
    assert num_new_objects < MAX_NEW_OBJECTS, num_new_objects
