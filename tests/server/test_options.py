"""Sampling options, stop strings, echo and usage over HTTP, over a fake engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.byte_tokenizers import write_byte_fallback
from fixtures.fake_engine import FakeEngine, Item, says
from fixtures.http_server import Server, events_of, texts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.tokenizer import Tokenizer
from eyas.types import FinishReason, SamplingParams, StepOutput

MakeServer = Callable[..., Server]

OPTIONS: dict[str, Any] = {
    "min_tokens": 2,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"7": -100, "12": 1.5},
    "stop": ["x", "yz"],
    "speculation": False,
}
WANTED = SamplingParams(
    max_tokens=9,
    min_tokens=2,
    top_k=5,
    top_p=0.5,
    min_p=0.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    logit_bias={7: -100, 12: 1.5},
    stop=("x", "yz"),
    speculation=False,
    logprobs=3,
)


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    return make_server(FakeEngine(says([0], [1, 2])))


def test_every_option_reaches_the_engine(server: Server) -> None:
    assert server.chat(max_tokens=9, logprobs=True, top_logprobs=3, **OPTIONS).status_code == 200
    assert server.complete(max_tokens=9, logprobs=3, **OPTIONS).status_code == 200
    assert [params for _, params in server.engine.submitted] == [WANTED, WANTED]


def test_other_ways_to_write_them(server: Server) -> None:
    server.complete(stop="one", top_k=-1, max_tokens=1)
    server.complete(min_tokens=30)
    first, second = (params for _, params in server.engine.submitted)
    assert (first.stop, first.top_k) == (("one",), 0)
    assert (second.min_tokens, second.max_tokens) == (30, 30)  # not the 16 of completions


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1.[key]"),
        ({"logit_bias": {"١": 1}}, "logit_bias.١.[key]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1001}, "stop[0]"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"speculation": 1}, "speculation"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"echo": 1}, "echo"),
    ],
)
def test_values_out_of_range(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.complete(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value"), error["message"]


def test_options_that_contradict_each_other(server: Server) -> None:
    for response, text in (
        (server.chat(min_tokens=5, max_tokens=3), "max_tokens must be at least 1 and min_tokens"),
        (server.chat(top_logprobs=2), "only allowed with logprobs: true"),
        (server.chat(logprobs=True, top_logprobs=21), "top_logprobs: "),
        (server.complete(echo=True, logprobs=0), "echo: with logprobs"),
        (server.chat(best_of=2), "unknown field(s): best_of"),
        (server.complete(best_of=2), "not supported: best_of"),
    ):
        assert response.status_code == 400
        assert text in response.json()["error"]["message"]
    assert not server.engine.submitted


def cut(tokens: list[int], cuts: list[int]) -> list[Item]:
    bounds = [0, *sorted(min(c, len(tokens) - 1) for c in cuts), len(tokens)]
    return [tokens[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@settings(max_examples=150, deadline=None)
@given(
    before=st.text(alphabet="stop 😀漢ไ", max_size=12),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    size=st.integers(1, 4),
)
def test_a_stop_string_is_never_shown_at_any_split(
    make_server: MakeServer, tokenizer: Tokenizer, before: str, cuts: list[int], size: int
) -> None:
    """The engine ends with the token that completes it; what came before is the answer."""
    stop = "stop😀"[:size] + "|"
    tokens = tokenizer.encode(before + stop)
    server = make_server(FakeEngine(says(*cut(tokens, cuts)), FinishReason.STOP))
    whole = server.complete(stop=[stop, "never"]).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (before, "stop")
    events = events_of(server.complete(stop=[stop, "never"], stream=True))
    assert texts_of(events) == {0: before}


def test_text_that_only_looks_like_a_stop_string_comes_at_the_end(
    make_server: MakeServer, tokenizer: Tokenizer
) -> None:
    server = make_server(FakeEngine(says(*cut(tokenizer.encode("aSTO"), [1, 2, 3]))))
    events = events_of(server.complete(stop="STOP", stream=True))
    assert texts_of(events) == {0: "aSTO"}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(
    make_server: MakeServer, tokenizer: Tokenizer, stream: bool
) -> None:
    answer = tokenizer.encode("the end")
    server = make_server(FakeEngine(says(answer[:2], answer[2:])))
    half = tokenizer.encode("x漢")[:-1]  # ends in two of three bytes
    for prompt, texts in (
        ("a ", ["a "]),
        (["a ", "bc"], ["a ", "bc"]),
        ([half, tokenizer.encode("d")], ["x\ufffd", "d"]),
    ):
        response = server.complete(prompt, echo=True, n=2, stream=stream)
        if stream:
            found = texts_of(events_of(response))
        else:
            found = {c["index"]: c["text"] for c in response.json()["choices"]}
        expected = [text + "the end" for text in texts for _ in range(2)]
        assert found == dict(enumerate(expected))


@pytest.mark.parametrize("stream", [False, True])
def test_the_space_between_prompt_and_answer_stays(tmp_path: Path, stream: bool) -> None:
    """Decoders of Llama 2's kind strip the first space of what they are given."""
    tokenizer = Tokenizer(write_byte_fallback(tmp_path))
    answer = tokenizer.encode("a the the")[-2:]
    server = Server(FakeEngine(says(answer[:1], answer[1:])), tokenizer)
    for echo in (False, True):
        response = server.complete("a the", echo=echo, stream=stream)
        if stream:
            [text] = texts_of(events_of(response)).values()
        else:
            text = response.json()["choices"][0]["text"]
        assert text == ("a the" if echo else "") + " the the"


def test_half_a_character_in_the_prompt_does_not_spoil_the_answer(
    make_server: MakeServer, tokenizer: Tokenizer
) -> None:
    """The answer is decoded alone: its first piece never brings the prompt along."""
    half = tokenizer.encode("long prompt 漢")[:-1]
    server = make_server(FakeEngine(says(*cut(tokenizer.encode("ok!"), [1, 2]))))
    events = events_of(server.complete(half, stream=True))
    assert [e["choices"][0]["text"] for e in events if e["choices"]] == ["o", "k", "!", ""]


def test_cached_tokens_are_counted_once_a_prompt(make_server: MakeServer) -> None:
    def script(prompt: list[int], params: SamplingParams) -> list[Item]:
        cached = {1: 16, 2: 32}[prompt[0]] if params.seed in (4, 6) else 64
        return [StepOutput("", (5,), num_cached_tokens=cached)]

    engine = FakeEngine(script)
    answer = make_server(engine).complete([[1] * 40, [2] * 40], n=2, seed=4).json()
    first = [p.seed for _, p in engine.submitted]
    assert first == [4, 5, 4, 5]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16 + 32}
    usage = {"include_usage": True}
    events = events_of(make_server(engine).complete([1] * 40, stream=True, stream_options=usage))
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert events[-1]["usage"]["total_tokens"] == 41


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_gives_up_fails_alone(
    make_server: MakeServer, stream: bool
) -> None:
    failed = StepOutput("", (), FinishReason.ERROR, error="OverflowError: too large")
    engine = FakeEngine(lambda prompt, _: [[0], failed] if prompt == [66] else [[0], [1]])
    server = make_server(engine)
    response = server.complete([66], stream=stream)
    assert response.status_code == (200 if stream else 500)
    assert "this request failed, others go on: OverflowError: too large" in response.text
    assert "[DONE]" not in response.text
    assert server.complete([65]).status_code == 200
