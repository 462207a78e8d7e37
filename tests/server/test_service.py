"""Generation: what is started together, ends together."""

import asyncio
import contextlib

import pytest
from fixtures.fake_engine import HANG, FakeEngine, Item, says
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.tokenizer import Tokenizer
from eyas.server.errors import ApiError
from eyas.server.service import MAX_SEQUENCES, Service
from eyas.types import FinishReason, SamplingParams

PARAMS = SamplingParams(max_tokens=5)


def service(engine: FakeEngine, tokenizer: Tokenizer) -> Service:
    return Service(engine, tokenizer)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet="the \n😀漢ไ\ufffd", max_size=20),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_collected_and_streamed_text_are_the_tokens_text(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    tokens = tokenizer.encode(text)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    chunks: list[Item] = [tokens[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]

    async def run() -> tuple[str, str, int]:
        under_test = service(FakeEngine(says(*chunks)), tokenizer)
        whole = await under_test.generate([[1]], PARAMS)
        [piece] = await whole.collect()
        streamed = await under_test.generate([[1]], PARAMS)
        pieces = [piece.text async for piece in streamed.pieces()]
        assert whole.num_completion_tokens == streamed.num_completion_tokens
        return piece.text, "".join(pieces), whole.num_completion_tokens

    assert asyncio.run(run()) == (text, text, len(tokens))


def test_a_generation_that_is_left_aborts_all_its_choices(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(says([1], HANG))

    async def run() -> None:
        generation = await service(engine, tokenizer).generate([[1], [2]], PARAMS, num_choices=2)
        async with contextlib.aclosing(generation.pieces()) as pieces:
            await anext(pieces)
        assert len(engine.running) == 4
        generation.close()
        generation.close()
        assert not engine.running and len(engine.aborted) == 4

    asyncio.run(run())


def test_choices_end_one_by_one(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda prompt, _: [[65]] * prompt[0], FinishReason.STOP)
    engine.eos_token_ids = (65,)

    async def run() -> list[tuple[int, str]]:
        generation = await service(engine, tokenizer).generate([[3], [1], [2]], PARAMS)
        ends = [p.index async for p in generation.pieces() if p.finish_reason is not None]
        assert ends == [1, 2, 0]
        generation = await service(engine, tokenizer).generate([[3], [1], [2]], PARAMS)
        return [(p.index, p.text) for p in await generation.collect()]

    one = tokenizer.decode([65])
    assert asyncio.run(run()) == [(0, one * 2), (1, ""), (2, one)]


def test_an_error_in_one_choice_ends_the_generation(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda prompt, _: [RuntimeError("odd")] if prompt == [2] else [[1], HANG])

    async def run() -> None:
        generation = await service(engine, tokenizer).generate([[1], [2]], PARAMS)
        with pytest.raises(RuntimeError, match="odd"):
            await generation.collect()

    asyncio.run(run())


def test_the_number_of_answers_is_limited(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(says([1]))

    async def run() -> None:
        with pytest.raises(ApiError, match="answers in one request"):
            await service(engine, tokenizer).generate([[1]] * (MAX_SEQUENCES + 1), PARAMS)
        await service(engine, tokenizer).generate([[1]] * MAX_SEQUENCES, PARAMS)

    asyncio.run(run())
    assert len(engine.submitted) == MAX_SEQUENCES
