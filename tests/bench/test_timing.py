"""Rates count tokens, whatever pieces they come in."""

from collections.abc import Iterator

import pytest

from eyas.bench.timing import Rates, TokenClock
from eyas.types import StepOutput


def clock(*, times: list[float], num_requests: int = 1) -> TokenClock:
    ticks: Iterator[float] = iter(times)
    return TokenClock(num_requests, now=lambda: next(ticks))


def step(request_id: str, num_tokens: int, *, num_rounds: int) -> StepOutput:
    return StepOutput(request_id, tuple(range(num_tokens)), num_rounds=num_rounds)


def test_prefill_is_left_out_of_the_decode_rate() -> None:
    timer = clock(times=[10.0, 12.0, 12.5, 13.0])
    for num_tokens in (1, 3, 2):
        timer.add(num_tokens, with_prefill=num_tokens == 1)
    rates = timer.rates()
    assert rates == Rates(
        num_tokens=6,
        seconds=3.0,
        first_token_seconds=2.0,
        decode_tokens=5,
        decode_seconds=1.0,
    )
    assert rates.decode_tokens_per_second == 5.0
    assert rates.tokens_per_second == 2.0


def test_a_round_that_is_read_with_the_prefill_is_not_decoding() -> None:
    timer = clock(times=[0.0, 1.0, 1.001, 2.001])
    for number, num_tokens in enumerate((1, 4, 3)):
        timer.add_step(step("a", num_tokens, num_rounds=number))
    assert timer.rates().decode_tokens_per_second == 3.0
    assert timer.rates().num_tokens == 8


def test_decoding_of_a_batch_begins_when_the_last_request_has_begun() -> None:
    timer = clock(times=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], num_requests=2)
    for request_id, num_tokens, num_rounds in (
        ("a", 1, 0),
        ("a", 1, 2),
        ("b", 1, 0),
        ("a", 2, 3),
        ("b", 2, 2),
    ):
        timer.add_step(step(request_id, num_tokens, num_rounds=num_rounds))
    rates = timer.rates()
    assert (rates.first_token_seconds, rates.decode_seconds) == (3.0, 2.0)
    assert (rates.decode_tokens, rates.num_tokens) == (4, 7)


def test_one_arrival_gives_no_decode_rate() -> None:
    timer = clock(times=[0.0, 2.0])
    timer.add(8, with_prefill=True)
    assert timer.rates().decode_tokens_per_second is None


def test_a_request_without_a_token_is_noticed() -> None:
    timer = clock(times=[0.0, 1.0], num_requests=2)
    timer.add(1, "a", with_prefill=True)
    with pytest.raises(AssertionError, match="no token"):
        timer.rates()


def test_batches_are_joined() -> None:
    one = Rates(10, 2.0, 0.5, 9, 1.5)
    other = Rates(20, 3.0, 1.5, 18, 1.5)
    joined = Rates.joined([one, other])
    assert joined == Rates(30, 5.0, 1.0, 27, 3.0)
    assert joined.decode_tokens_per_second == 9.0
