"""Looped output is told from text that merely repeats some words."""

import random

import pytest

from eyas.bench.loops import WINDOW, distinct_bigrams, is_looping


def varied(length: int, *, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000) for _ in range(length)]


def test_distinct_bigrams() -> None:
    assert distinct_bigrams([1, 2, 1, 2, 3]) == 3
    assert distinct_bigrams([5]) == distinct_bigrams([]) == 0


@pytest.mark.parametrize("period", [1, 2, 3, 8, 30])
def test_a_loop_of_any_period_is_found(period: int) -> None:
    assert is_looping((varied(period) * 200)[: 2 * WINDOW])


def test_a_loop_that_begins_late_is_found() -> None:
    assert is_looping(varied(300) + [7, 8] * (WINDOW // 2))


def test_a_loop_that_ends_is_found() -> None:
    assert is_looping([7, 8] * (WINDOW // 2) + varied(300))


def test_varied_text_is_no_loop() -> None:
    assert not is_looping(varied(500))


def test_text_with_repeated_phrases_is_no_loop() -> None:
    phrase = varied(6, seed=1)
    text = [token for seed in range(2, 20) for token in (*phrase, *varied(14, seed=seed))]
    assert not is_looping(text)


@pytest.mark.parametrize("tokens", [[], [3], [3, 4]])
def test_too_short_to_tell(tokens: list[int]) -> None:
    assert not is_looping(tokens)
