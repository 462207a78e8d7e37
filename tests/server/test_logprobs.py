"""Log-probabilities in both formats: streamed ones are the others, whatever the chunks."""

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fixtures.byte_tokenizers import EOS, write_byte_fallback
from fixtures.fake_engine import FakeEngine, Item, says
from fixtures.http_server import Server, events_of
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.tokenizer import Tokenizer
from eyas.types import FinishReason, StepOutput, TokenLogprob

MakeServer = Callable[..., Server]


def logprob(token: int) -> TokenLogprob:
    """Made up from the token, with two alternatives; the token itself is the second."""
    return TokenLogprob(token, -1 - token / 100, ((65, -0.5), (token, -1 - token / 100)))


def chunks(tokens: list[int], cuts: list[int]) -> list[Item]:
    bounds = [0, *sorted(min(c, len(tokens)) for c in cuts), len(tokens)]
    return [
        StepOutput("", tuple(tokens[a:b]), logprobs=tuple(map(logprob, tokens[a:b])))
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The log-probabilities of a stream's chunks, list by list."""
    found: dict[str, list[Any]] = {}
    for event in events:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            found.setdefault(name, []).extend(values or [])
    return found


@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet="the😀漢ไ", max_size=8), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_streamed_logprobs_are_the_others(
    make_server: MakeServer, tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    tokens = [*tokenizer.encode(text), 5]
    server = make_server(FakeEngine(says(*chunks(tokens, cuts))))
    whole = server.complete(logprobs=2, stop="ไ|").json()["choices"][0]["logprobs"]
    assert joined(events_of(server.complete(logprobs=2, stop="ไ|", stream=True))) == whole
    assert whole["token_logprobs"] == [logprob(token).logprob for token in tokens]
    assert len(whole["tokens"]) == len(whole["top_logprobs"]) == len(tokens)
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stop": "ไ|"}
    chat = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    assert joined(events_of(server.chat(stream=True, **fields)))["content"] == chat
    assert b"".join(bytes(one["bytes"]) for one in chat[:-1]).decode() == text
    assert [one["logprob"] for one in chat] == whole["token_logprobs"]


def ask(make_server: MakeServer, tokens: list[int], finish: FinishReason) -> Server:
    engine = FakeEngine(says(*chunks(tokens, [2])), finish)
    engine.eos_token_ids = (tokens[-1],)
    return make_server(engine)


def test_the_completions_format(make_server: MakeServer, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a 漢")
    server = ask(make_server, tokens, FinishReason.LENGTH)
    choice = server.complete("xy", logprobs=2).json()["choices"][0]
    parts = [f"bytes:\\x{byte:02x}" for byte in "漢".encode()]
    assert choice["logprobs"]["tokens"] == ["a", " ", *parts]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 2]
    first = choice["logprobs"]["top_logprobs"][2]
    a = tokenizer.token_bytes(65).decode()
    assert first == {a: -0.5, parts[0]: logprob(tokens[2]).logprob}


def test_the_chosen_token_is_always_among_the_completions_alternatives(
    make_server: MakeServer,
) -> None:
    [one] = [TokenLogprob(70, -7.0, ((65, -0.5),))]
    server = make_server(FakeEngine(says(StepOutput("", (70,), logprobs=(one,)))))
    top = server.complete(logprobs=1).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert sorted(top[0].values()) == [-7.0, -0.5]
    chat = server.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert [alternative["logprob"] for alternative in chat[0]["top_logprobs"]] == [-0.5]


def test_a_stop_token_has_its_log_probability_and_its_name(
    make_server: MakeServer, tokenizer: Tokenizer
) -> None:
    eos = tokenizer.encode(EOS)[0]
    server = ask(make_server, [*tokenizer.encode("ab"), eos], FinishReason.STOP)
    answer = server.chat(logprobs=True).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "ab"
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["a", "b", EOS]
    assert answer["usage"]["completion_tokens"] == 3


def test_what_json_cannot_say(make_server: MakeServer) -> None:
    def server(value: float) -> Server:
        one = TokenLogprob(70, value, ((65, -0.5),))
        return make_server(FakeEngine(says(StepOutput("", (70,), logprobs=(one,)))))

    def values(response: httpx.Response) -> Any:
        return response.json()["choices"][0]["logprobs"]["token_logprobs"]

    assert values(server(-math.inf).complete(logprobs=1)) == [-9999.0]
    assert server(math.nan).complete(logprobs=1).status_code == 500
    events = server(math.nan).complete(logprobs=1, stream=True).text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "internal"


@pytest.mark.parametrize("text", ["the 😀漢 the", " the"])
def test_bytes_of_tokens_of_both_families(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    fallback = Tokenizer(write_byte_fallback(tmp_path_factory.mktemp("fallback")))
    for one, prefix in ((tokenizer, ""), (fallback, " ")):
        pieces = [one.token_bytes(token) for token in one.encode(text)]
        assert b"".join(pieces).decode() == prefix + text
        assert one.token_bytes(one.encode(EOS)[-1]).decode() == EOS
        assert one.token_bytes(10**6) == b""
