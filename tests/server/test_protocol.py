"""Bodies: what is refused, by which name, and what passes without harm."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.fake_engine import FakeEngine, says
from fixtures.http_server import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.server.errors import ApiError
from eyas.server.protocol import (
    ChatRequest,
    CompletionRequest,
    StreamUsage,
    parse_request,
)

MESSAGES = [{"role": "user", "content": "a"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"messages": MESSAGES} | fields).encode())


def complete(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"prompt": "a"} | fields).encode())


def refusal(ask: Callable[..., object], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert caught.value.status == 400
    return caught.value


BOTH = {
    "response_format": {"type": "json_object"},
    "prompt_logprobs": 1,
    "structured_outputs": {"regex": "a"},
    "include_stop_str_in_output": True,
    "use_beam_search": True,
}
CHAT_ONLY = {
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "reasoning_effort": "low",
    "modalities": ["text", "audio"],
    "continue_final_message": True,
}
COMPLETION_ONLY = {"suffix": "x", "best_of": 2}


@pytest.mark.parametrize(
    ("ask", "name", "value"),
    [
        *((ask, *item) for ask in (chat, complete) for item in BOTH.items()),
        *((chat, *item) for item in CHAT_ONLY.items()),
        *((complete, *item) for item in COMPLETION_ONLY.items()),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    ask: Callable[..., object], name: str, value: Any
) -> None:
    error = refusal(ask, **{name: value})
    assert (error.param, error.code) == (name, "unsupported_field")
    assert f"not supported: {name};" in error.message


def test_all_refused_fields_are_named_together() -> None:
    error = refusal(complete, suffix="a", priority=3, best_of=2)
    assert "not supported: priority, best_of, suffix;" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0.0, "logit_bias": {}},
        {"top_k": 0, "frequency_penalty": 0, "repetition_penalty": 1.0, "stop": []},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"top_p": None, "stop": None, "logprobs": None, "seed": None, "temperature": None},
        {"n": None, "stream": None, "stream_options": None, "max_tokens": None, "model": None},
    ],
)
@pytest.mark.parametrize("ask", [chat, complete])
def test_fields_that_ask_for_nothing_pass(
    ask: Callable[..., object], fields: dict[str, Any]
) -> None:
    assert ask(**fields).sampling_params() == ask().sampling_params()


def test_fields_of_chat_that_ask_for_nothing_pass() -> None:
    fields = {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "logprobs": False,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "reasoning_effort": None,
    }
    assert chat(**fields) == chat()


@pytest.mark.parametrize(("name", "value"), [("top_p", True), ("logprobs", 0), ("min_p", False)])
def test_a_boolean_is_no_number(name: str, value: Any) -> None:
    assert refusal(chat, **{name: value}).param == name


def test_unknown_fields_are_named_with_what_was_meant() -> None:
    error = refusal(chat, temprature=1, zzz=None)
    assert error.message == "unknown field(s): temprature (did you mean temperature?), zzz"
    assert (error.param, error.code) == ("temprature", "unknown_field")
    assert "chat_template_kwargs" in refusal(complete, chat_template_kwargs={}).message


def test_what_a_client_made_up_is_shown_in_part() -> None:
    many = refusal(chat, **{f"field{i}": 1 for i in range(200_000)})  # and quickly
    assert many.message.endswith("field9, and 199990 more")
    long = refusal(chat, **{"temp" * 100_000: 1})
    assert len(long.message) < 200 and len(long.param or "") < 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "root", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ({"messages": [MESSAGES[0] | {"tool_calls": [{"id": 1}]}]}, "messages[0]"),
        ({"messages": [MESSAGES[0] | {"nick": "a"}]}, "messages[0].nick"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
    ],
)
def test_wrong_values_are_refused_with_their_place(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat, **fields)
    assert (error.param, error.code) == (param, "invalid_value")
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        [[]],
        5,
        {},
        [1.5],
        [True],
        ["a", [1]],
        [1, "a"],
        [["a"]],
        [[1], []],
        [None],
        [[[1]]],
    ],
    ids=str,
)
def test_prompts_of_no_known_form(prompt: Any) -> None:
    assert refusal(complete, prompt=prompt).param == "prompt"


def test_limits_of_the_seed() -> None:
    assert chat(seed=2**64 - 1).seed == 2**64 - 1
    assert chat(seed=-(2**63)).seed == -(2**63)


def test_two_limits_that_differ() -> None:
    assert "differ" in refusal(chat, max_tokens=5, max_completion_tokens=6).message
    assert chat(max_tokens=5, max_completion_tokens=5).max_tokens == 5


def test_stream_options_without_a_stream() -> None:
    assert "only allowed with stream" in refusal(chat, stream_options={}).message
    for options, told in (
        ({}, StreamUsage.NONE),
        ({"continuous_usage_stats": True}, StreamUsage.NONE),
        ({"include_usage": None, "include_obfuscation": None}, StreamUsage.NONE),
        ({"include_usage": True}, StreamUsage.LAST),
        ({"include_usage": True, "continuous_usage_stats": True}, StreamUsage.ALWAYS),
    ):
        assert chat(stream=True, stream_options=options).usage_in_stream is told


def test_messages_as_templates_want_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(
        messages=[
            {"role": "developer", "content": "rules", "name": "boss"},
            {"role": "user", "content": parts},
            # As clients send back what they got.
            {"role": "assistant", "content": "", "tool_calls": [], "refusal": None, "audio": None},
        ]
    )
    assert [message.for_template() for message in request.messages] == [
        {"role": "system", "content": "rules", "name": "boss"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([{"type": "text", "text": "a", "cache_control": {}}], "part 0: cache_control is not"),
        ([{"type": "text", "text": "a"}] * 5000, "5000 parts, at most 4096"),
        ([{"type": "text"}], "part 0 is neither"),
        ([["text"]], "part 0 is neither"),
    ],
)
def test_parts_are_not_silently_cut(parts: list[Any], text: str) -> None:
    error = refusal(chat, messages=[{"role": "user", "content": parts}])
    assert error.param == "messages[0].content" and text in error.message


def test_nulls_beside_a_text_pass() -> None:
    part = {"type": "text", "text": "a", "cache_control": None}
    assert chat(messages=[{"role": "user", "content": [part]}]).messages[0].content == "a"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud83d"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": [' + b"9" * 100 + b"]}",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "prompt": 5}',
    ],
    ids=lambda body: str(body[:30]),
)
def test_broken_bodies_are_the_clients_mistake(
    make_server: Callable[..., Server], body: bytes
) -> None:
    response = make_server(FakeEngine(says([0]))).post("/v1/completions", body)
    if body.count(b"9") == 100:  # it parses: the engine refuses such a token
        assert response.status_code in (200, 400)
        return
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *BOTH, *CHAT_ONLY, "user"})
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(NAMES, JSON, max_size=4),
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
)
def test_no_body_is_an_error_of_the_server(
    make_server: Callable[..., Server], fields: dict[str, Any], path: str
) -> None:
    start = {"prompt": [1]} if path == "/v1/completions" else {"messages": MESSAGES}
    response = make_server(FakeEngine(says([0]))).post(path, start | fields)
    assert response.status_code in (200, 400, 404), response.text
