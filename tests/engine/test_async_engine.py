"""The thread of the engine: acceptance before output, aborts that free all, one report of death."""

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
from fixtures.tiny import assert_idle, make_engine, random_prompts, run, tiny_target, worker_shape

from eyas.engine.async_engine import (
    AsyncEngine,
    EngineDeadError,
    RequestFailedError,
    RequestStream,
)
from eyas.engine.engine import Engine
from eyas.speculative.state import SlotSettings
from eyas.types import EyasError, FinishReason, SamplingParams, StepOutput

T = TypeVar("T")
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=120, temperature=0.0)


def with_engine(test: Callable[[AsyncEngine], Awaitable[T]], engine: Engine | None = None) -> T:
    """Run a test in an event loop with a started engine, which is stopped afterwards."""

    async def body() -> T:
        running = AsyncEngine(engine or make_engine(tiny_target()))
        running.start()
        try:
            return await asyncio.wait_for(test(running), 30)
        finally:
            await running.stop()

    return asyncio.run(body())


async def tokens_of(stream: RequestStream) -> list[int]:
    return [token async for output in stream for token in output.new_token_ids]


async def idle(engine: AsyncEngine) -> None:
    """Wait until nothing is held; a test that leaks runs into its time limit."""
    while (s := engine.status()).num_running + s.num_waiting or s.num_free_pages != s.num_pages:
        await asyncio.sleep(0.005)


def test_streams_of_several_requests_are_what_the_engine_says() -> None:
    prompts = random_prompts([3, 20, 40])
    expected = run(make_engine(tiny_target()), prompts, [GREEDY] * 3)

    async def test(engine: AsyncEngine) -> list[list[int]]:
        streams = await asyncio.gather(
            *(engine.submit(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts))
        )
        return await asyncio.gather(*map(tokens_of, streams))

    assert with_engine(test) == [result.tokens for result in expected]


def test_a_refusal_comes_before_any_output_and_alone() -> None:
    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(EyasError, match="the prompt has 320 tokens, the model length is 320"):
            await engine.submit("long", [1] * 320, GREEDY)
        with pytest.raises(EyasError, match="outside the vocabulary"):
            await engine.submit("odd", [10**6], GREEDY)
        assert len(await tokens_of(await engine.submit("good", [1], GREEDY))) == 20
        await idle(engine)

    with_engine(test)


def test_an_error_of_ours_in_adding_concerns_that_request_alone() -> None:
    engine = make_engine(tiny_target())
    add = engine.add

    def poisoned(request_id: str, *request: Any) -> None:
        if request_id == "bad":
            raise OverflowError("too large")
        add(request_id, *request)

    engine.add = poisoned  # type: ignore[method-assign,assignment]

    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(RequestFailedError, match="OverflowError: too large"):
            await engine.submit("bad", [1], GREEDY)
        assert len(await tokens_of(await engine.submit("good", [1], GREEDY))) == 20

    with_engine(test, engine)


def test_closing_a_stream_frees_its_slot_and_pages() -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit("a", [1] * 100, ENDLESS)
        await anext(stream)
        assert engine.status().num_running == 1
        stream.close()
        stream.close()
        await idle(engine)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with_engine(test)


def test_the_counters_are_right_after_the_last_request_was_left() -> None:
    engine = make_engine(tiny_target())

    async def test(running: AsyncEngine) -> None:
        stream = await running.submit("a", [1], ENDLESS)
        for _ in range(10):
            await anext(stream)
        stream.close()
        await idle(running)
        async with asyncio.timeout(10):
            while running.counters != engine.stats.counters:
                await asyncio.sleep(0.01)
        assert running.counters.num_round_tokens >= 9

    with_engine(test, engine)


@pytest.mark.parametrize("seconds", [0, 0.001, 0.01])
def test_giving_up_while_waiting_for_acceptance_is_an_abort(seconds: float) -> None:
    async def test(engine: AsyncEngine) -> None:
        submissions = [
            asyncio.ensure_future(engine.submit(str(i), [1] * 200, ENDLESS)) for i in range(12)
        ]
        await asyncio.sleep(seconds)
        for submission in submissions:
            if not submission.cancel():
                submission.result().close()
        await asyncio.gather(*submissions, return_exceptions=True)
        await idle(engine)

    with_engine(test)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_aborts_at_any_moment_leave_nothing_behind(page_size: int) -> None:
    rng = random.Random(page_size)
    shape = worker_shape(page_size=page_size, num_pages=3000 // page_size)
    engine = make_engine(tiny_target(), shape=shape, chunk_tokens=16)

    async def one(engine: AsyncEngine, number: int) -> None:
        params = SamplingParams(max_tokens=rng.randint(1, 8), temperature=1.0, seed=number)
        stream = await engine.submit(str(number), [1] * rng.randint(1, 60), params)
        for _ in range(rng.randint(0, 4) if number % 3 == 0 else 100):
            if (await anext(stream, None)) is None:
                break
        stream.close()

    async def test(engine: AsyncEngine) -> None:
        for start in range(0, 96, 24):  # eight slots: most of them wait first
            await asyncio.gather(*(one(engine, start + i) for i in range(24)))
        await idle(engine)
        # Every slot can still be had.
        streams = [await engine.submit(f"last{i}", [1], ENDLESS) for i in range(8)]
        for stream in streams:
            await anext(stream)
        assert (engine.status().num_running, engine.status().num_waiting) == (8, 0)

    with_engine(test, engine)


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit("a", [1], GREEDY)
        with pytest.raises(EyasError, match="in use"):
            await engine.submit("a", [2], GREEDY)
        assert len(await tokens_of(stream)) == 20

    with_engine(test)


def test_death_reaches_every_stream_and_later_requests() -> None:
    engine = make_engine(tiny_target())
    step = engine.step

    def dies() -> list[StepOutput]:
        if len(engine.requests) == 2:
            raise RuntimeError("the device is gone")
        return step()

    engine.step = dies  # type: ignore[method-assign]

    async def test(engine: AsyncEngine) -> None:
        streams = [await engine.submit(name, [1], ENDLESS) for name in "ab"]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="RuntimeError: the device is gone"):
                await tokens_of(stream)
        assert await engine.died() == engine.error == "RuntimeError: the device is gone"
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await engine.submit("c", [1], GREEDY)

    with_engine(test, engine)


def test_stopping_ends_open_streams_and_is_no_death() -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit("a", [1], ENDLESS)
        await engine.stop()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await tokens_of(stream)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.died(), 0.01)

    with_engine(test)


def test_the_last_output_carries_the_reason() -> None:
    async def test(engine: AsyncEngine) -> list[FinishReason | None]:
        stream = await engine.submit("a", [1], SamplingParams(max_tokens=2, temperature=0.0))
        return [output.finish_reason async for output in stream]

    assert with_engine(test)[-1] is FinishReason.LENGTH


def test_an_error_in_admission_ends_that_request_alone() -> None:
    engine = make_engine(tiny_target())
    enter = engine.worker.admit

    def poisoned(slot: int, settings: SlotSettings, **pages: Any) -> None:
        if settings.prompt_token_ids[0] == 13:
            raise OverflowError("too large")
        enter(slot, settings, **pages)

    engine.worker.admit = poisoned  # type: ignore[method-assign,assignment]

    async def test(engine: AsyncEngine) -> None:
        streams = [await engine.submit(str(i), [i], GREEDY) for i in (1, 13, 2)]
        outputs = [[output async for output in stream] for stream in streams]
        assert [o[-1].finish_reason for o in outputs] == ["length", "error", "length"]
        assert outputs[1][-1].error == "OverflowError: too large"
        await idle(engine)

    with_engine(test, engine)
    assert_idle(engine)


def test_a_tokenizer_that_fails_in_a_stop_string_ends_that_request_alone() -> None:
    engine = make_engine(tiny_target(), run_ahead=1)

    class Broken:
        def decode(self, token_ids: Sequence[int]) -> str:
            if len(token_ids) == 1:  # of the prompt
                return "a"
            raise ValueError("no such token")

    engine.tokenizer = Broken()

    async def test(engine: AsyncEngine) -> None:
        stop = dataclasses.replace(GREEDY, stop=("x",))
        bad, good = await engine.submit("bad", [1], stop), await engine.submit("good", [1], GREEDY)
        assert [o async for o in bad][-1].error == "ValueError: no such token"
        assert len(await tokens_of(good)) == 20
        await idle(engine)

    with_engine(test, engine)
    engine.step()  # a last launch that nobody waits for
    assert_idle(engine)
