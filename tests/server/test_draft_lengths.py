"""Answers over HTTP of a real engine at every draft length: usage, stops and the length limit."""

import asyncio
from typing import Any

import httpx
import pytest
from fixtures.http_server import Server, events_of, texts_of
from fixtures.served_engine import VOCAB
from fixtures.tiny import (
    MODEL_LEN,
    llama_config,
    make_engine,
    run,
    scripted,
    tiny_target,
    worker_shape,
)

from eyas.config import PLAIN, TreeShape
from eyas.engine.async_engine import AsyncEngine
from eyas.engine.engine import Engine
from eyas.engine.tokenizer import Tokenizer
from eyas.types import SamplingParams

PROMPT = [7, 70, 107]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 30}


def engine_with(num_levels: int) -> Engine:
    """A draft that knows the greedy text: its blocks are as long as they can be."""
    target = tiny_target(llama_config(vocab_size=VOCAB, num_layers=2))
    if not num_levels:
        return make_engine(target, shape=worker_shape(PLAIN), run_ahead=1)
    params = SamplingParams(temperature=0, max_tokens=60)
    [text] = run(make_engine(target), [PROMPT], [params])
    draft = scripted([PROMPT + text.tokens], vocab_size=VOCAB)
    tree = TreeShape(num_levels, 1, num_levels + 1)
    return make_engine(target, draft, worker_shape(tree), run_ahead=1)


def answers(
    tokenizer: Tokenizer, num_levels: int, requests: list[dict[str, Any]]
) -> tuple[list[httpx.Response], AsyncEngine]:
    async def run_all() -> tuple[list[httpx.Response], AsyncEngine]:
        engine = engine_with(num_levels)
        engine.tokenizer = tokenizer
        running = AsyncEngine(engine)
        running.start()
        server = Server(running, tokenizer)  # type: ignore[arg-type]
        try:
            path = "/v1/completions"
            return [await server.ask("POST", path, json=one) for one in requests], running
        finally:
            await running.stop()

    return asyncio.run(run_all())


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> list[int]:
    """The greedy continuation."""
    params = SamplingParams(temperature=0, max_tokens=30)
    [text] = run(engine_with(0), [PROMPT], [params])
    return text.tokens


@pytest.mark.parametrize("num_levels", range(6))
def test_usage_is_the_number_of_tokens(
    tokenizer: Tokenizer, plain: list[int], num_levels: int
) -> None:
    stop_id = plain[17]
    place = plain.index(stop_id)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    free = {"prompt": PROMPT, **GREEDY}
    stopped = free | {"stop_token_ids": [stop_id]}
    responses, engine = answers(
        tokenizer, num_levels, [free, free | usage, stopped, stopped | usage]
    )
    whole, stopped_whole = responses[0].json(), responses[2].json()
    assert whole["choices"][0]["text"] == tokenizer.decode(plain)
    assert whole["usage"]["completion_tokens"] == 30
    assert stopped_whole["choices"][0]["text"] == tokenizer.decode(plain[:place])
    assert stopped_whole["choices"][0]["finish_reason"] == "stop"
    assert stopped_whole["usage"]["completion_tokens"] == place + 1
    for response, other in ((responses[1], whole), (responses[3], stopped_whole)):
        events = events_of(response)
        assert texts_of(events)[0] == other["choices"][0]["text"]
        assert events[-1]["usage"] == other["usage"]
    if num_levels:  # all is accepted but what the ends of the texts cut
        counters = engine.counters
        mean = counters.num_round_tokens / counters.num_round_requests
        assert mean > 0.6 * (num_levels + 1), "the draft is not right: this proves little"


@pytest.mark.parametrize("num_levels", range(6))
def test_usage_so_far_is_the_number_of_tokens_so_far(tokenizer: Tokenizer, num_levels: int) -> None:
    """What a client knows that leaves in the middle."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"prompt": PROMPT, "stream": True, "stream_options": options, "logprobs": 0, **GREEDY}
    [response], _ = answers(tokenizer, num_levels, [fields])
    num_tokens, sizes = 0, set()
    for event in events_of(response):
        logprobs = [choice["logprobs"] for choice in event["choices"] if choice["logprobs"]]
        size = sum(len(one["tokens"]) for one in logprobs)
        num_tokens += size
        sizes.add(size)
        assert event["usage"]["completion_tokens"] == num_tokens
    assert num_tokens == 30 and max(sizes) == num_levels + 1


@pytest.mark.parametrize("num_levels", [0, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_around_the_limit(tokenizer: Tokenizer, num_levels: int, stream: bool) -> None:
    base: dict[str, Any] = {"stream": stream, "temperature": 0}
    if stream:
        base["stream_options"] = {"include_usage": True}
    requests = [
        base | {"prompt": [5] * (MODEL_LEN - 1)},
        base | {"prompt": [5] * MODEL_LEN},
        base | {"prompt": [5] * (MODEL_LEN - 3), "max_tokens": 4},
    ]
    (fits, full, over), _ = answers(tokenizer, num_levels, requests)
    usage = events_of(fits)[-1]["usage"] if stream else fits.json()["usage"]
    assert usage["completion_tokens"] == 1
    for response, numbers in ((full, ("320 tokens", "320")), (over, ("317", "4", "320"))):
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert all(number in error["message"] for number in numbers)
