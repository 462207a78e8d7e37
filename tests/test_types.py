"""What sampling parameters refuse: with the name, the range and the value given."""

import math
from typing import Any

import numpy as np
import pytest

from eyas.types import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    EyasError,
    FinishReason,
    RequestOutput,
    SamplingParams,
)

RANGES = {
    "temperature": (0, 100),
    "top_k": (0, 2**31),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "n": (1, 128),
    "logprobs": (0, MAX_LOGPROBS),
}


@pytest.mark.parametrize("name", list(RANGES))
def test_ranges(name: str) -> None:
    low, high = RANGES[name]
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(EyasError, match=f"{name} must be between .* not {value}"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_numbers(name: str, value: float) -> None:
    with pytest.raises(EyasError, match=f"{name} must be between"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"top_p": 0}, "top_p must be above 0; use temperature 0"),
        ({"top_p": 1.001}, "top_p must be between 0 and 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 3, "min_tokens": 4}, r"at least 1 and min_tokens \(4\), not 3"),
        ({"min_tokens": -1}, "min_tokens must be between"),
        ({"stop": ("a", "")}, "stop strings must not be empty"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids must not be negative"),
        ({"logit_bias": {3: 100.5}}, "logit_bias values must be between -100 and 100"),
        ({"logit_bias": {3: math.nan}}, "logit_bias values must be between -100 and 100"),
        (
            {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)},
            "logit_bias may have 300 entries at most",
        ),
    ],
)
def test_refusals(settings: dict[str, object], text: str) -> None:
    with pytest.raises(EyasError, match=text):
        SamplingParams(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": None}, "temperature must be a number, not None"),
        ({"top_k": 5.0}, "top_k must be an integer, not 5.0"),
        ({"n": True}, "n must be an integer, not True"),
        ({"max_tokens": "5"}, "max_tokens must be an integer or None, not '5'"),
        ({"seed": 1.5}, "seed must be an integer or None"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
        ({"stop": [1]}, "stop must be a tuple, each item a string"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a tuple, each item an integer, not 5"),
        ({"logit_bias": {"5": 1}}, "logit_bias must be a mapping from an integer to a number"),
        ({"logit_bias": [5]}, "logit_bias must be a mapping"),
    ],
)
def test_values_of_the_wrong_kind(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(EyasError, match=text) as caught:
        SamplingParams(**settings)
    assert caught.value.param == next(iter(settings))


def test_numpy_numbers_and_lists_are_as_good() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5), temperature=np.float32(0.5), stop=["a"], stop_token_ids=[3]
    )
    assert params.max_tokens == 5


def test_what_is_just_allowed() -> None:
    SamplingParams(
        max_tokens=4,
        min_tokens=4,
        top_p=1e-9,
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), -100.0),
    )


def test_acceptance_length_is_tokens_a_round() -> None:
    output = RequestOutput("a", [1], [2, 3, 4], "", FinishReason.STOP)
    assert math.isnan(output.acceptance_length)
    output.num_rounds, output.num_round_tokens = 2, 5
    assert output.acceptance_length == 2.5


def test_a_bare_string_is_no_list_of_stops() -> None:
    with pytest.raises(EyasError, match=r"write \('END',\)"):
        SamplingParams(stop="END")  # type: ignore[arg-type]
