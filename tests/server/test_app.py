"""The routes: answers, streams, usage and errors, over a fake engine."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.fake_engine import MODEL_LEN, FakeEngine, Item, says
from fixtures.http_server import Server, events_of, texts_of

from eyas.engine.async_engine import EngineDeadError
from eyas.engine.tokenizer import Tokenizer
from eyas.types import FinishReason, SamplingParams

MakeServer = Callable[..., Server]
TEXT = "the 😀漢字!"


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    return make_server(FakeEngine(says([0], [1, 2])))


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return dict(error)


def test_health_tells_the_engine_load(server: Server) -> None:
    response = server.get("/health")
    assert response.status_code == 200
    assert response.json() == {
        "status": "ready",
        "num_running": 0,
        "num_waiting": 0,
        "num_free_pages": 7,
        "num_pages": 9,
    }


def test_models(server: Server) -> None:
    card = server.get("/v1/models").json()["data"]
    assert [(c["id"], c["object"], c["max_model_len"]) for c in card] == [
        ("tiny", "model", MODEL_LEN)
    ]
    assert server.get("/v1/models/tiny").json() == card[0]
    assert error_of(server.get("/v1/models/an/other"), 404)["code"] == "model_not_found"


def test_a_chat_answer(make_server: MakeServer, tokenizer: Tokenizer) -> None:
    engine = FakeEngine(says(tokenizer.encode(TEXT)))
    response = make_server(engine).chat("hi", model="tiny").json()
    assert response.pop("id").startswith("chatcmpl-")
    assert response.pop("created") > 1.7e9
    num_prompt, num_answer = len("user: hi\nassistant: "), len(tokenizer.encode(TEXT))
    assert response == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        # "he" of "the" is one token.
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert engine.submitted[0][1] == SamplingParams()


def test_settings_reach_the_engine(server: Server) -> None:
    fields = {"temperature": 0, "seed": 5, "stop_token_ids": [7], "ignore_eos": True}
    server.chat(max_completion_tokens=9, chat_template_kwargs={"mood": "?"}, **fields)
    server.complete([3, 4], max_tokens=9, **fields)
    expected = SamplingParams(
        max_tokens=9, temperature=0, seed=5, stop_token_ids=(7,), ignore_eos=True
    )
    (chat_prompt, chat_params), (prompt, params) = server.engine.submitted
    assert chat_params == params == expected
    assert prompt == [3, 4]
    assert server.tokenizer.decode(chat_prompt) == "user: a\nassistant?: "


@pytest.mark.parametrize("prompt", ["a the", [64, 65], ["a", "the"], [[64], [65, 66]]], ids=str)
def test_every_form_of_prompt(server: Server, prompt: Any) -> None:
    answer = server.complete(prompt).json()
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    encode = server.tokenizer.encode
    expected = [encode(p) if isinstance(p, str) else p for p in many]
    assert [p for p, _ in server.engine.submitted] == expected
    assert [c["index"] for c in answer["choices"]] == list(range(len(many)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 3 * len(many)
    assert (answer["object"], answer["id"][:5]) == ("text_completion", "cmpl-")


def test_choices_come_prompt_by_prompt_with_seeds_counted_up(
    make_server: MakeServer,
) -> None:
    engine = FakeEngine(lambda prompt, params: [[prompt[0] + (params.seed or 0)]])
    server = make_server(engine)
    answer = server.complete([[10], [20]], n=3, seed=4).json()
    seeds = [(p, params.seed) for p, params in engine.submitted]
    assert seeds == [([10], 4), ([10], 5), ([10], 6), ([20], 4), ([20], 5), ([20], 6)]
    decode = server.tokenizer.decode
    assert [c["text"] for c in answer["choices"]] == [
        decode([token]) for token in (14, 15, 16, 24, 25, 26)
    ]
    usage = {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_without_a_seed_the_engine_draws_one_for_each_choice(server: Server) -> None:
    server.chat(n=2)
    assert [params.seed for _, params in server.engine.submitted] == [None, None]


def test_completions_are_short_unless_told(server: Server) -> None:
    server.complete([1] * 20)
    server.complete([1] * (MODEL_LEN - 3))
    assert [params.max_tokens for _, params in server.engine.submitted] == [16, 3]


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_stop_token_is_counted_and_not_shown(
    make_server: MakeServer, tokenizer: Tokenizer, finish: FinishReason
) -> None:
    [a, b] = tokenizer.encode("ab")
    engine = FakeEngine(says([a], [a, b]), finish)
    engine.eos_token_ids = (b,)
    server = make_server(engine)
    answer = server.complete().json()
    assert answer["choices"][0]["text"] == ("aa" if finish is FinishReason.STOP else "aab")
    assert answer["choices"][0]["finish_reason"] == finish
    assert answer["usage"]["completion_tokens"] == 3
    events = events_of(server.complete(stream=True, stream_options={"include_usage": True}))
    assert texts_of(events)[0] == answer["choices"][0]["text"]
    assert events[-1]["usage"] == answer["usage"]


def cut(tokens: list[int], size: int) -> list[Item]:
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_stream_is_the_answer(
    make_server: MakeServer, tokenizer: Tokenizer, size: int, missing: int
) -> None:
    tokens = tokenizer.encode(TEXT * 2 + "字")
    tokens = tokens[: len(tokens) - missing]  # may end in the middle of a character
    server = make_server(FakeEngine(says(*cut(tokens, size))))
    for path in ("chat", "completions"):
        ask = server.chat if path == "chat" else server.complete
        whole = ask().json()["choices"][0]
        text = whole["message"]["content"] if path == "chat" else whole["text"]
        assert text == TEXT * 2 + ("\ufffd" if missing else "字")
        events = events_of(ask(stream=True))
        assert texts_of(events) == {0: text}
        assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]][-1] == "length"
        assert all("usage" not in e for e in events)


def test_a_chat_stream_in_full(make_server: MakeServer, tokenizer: Tokenizer) -> None:
    server = make_server(FakeEngine(says(tokenizer.encode("a the"), tokenizer.encode("!"))))
    events = events_of(server.chat(stream=True, stream_options={"include_usage": True}))
    assert len({(e["id"], e["created"], e["object"], e["system_fingerprint"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert [e["choices"][0]["delta"] for e in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "a the"},
        {"content": "!"},
        {},
    ]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, None, None, "length"]
    assert [e["usage"] for e in events[:-1]] == [None] * 4
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len(tokenizer.encode("a the")) + 1


def test_usage_so_far_in_every_chunk(make_server: MakeServer) -> None:
    server = make_server(FakeEngine(says([0], [1, 2])))
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(server.complete([5, 6], stream=True, stream_options=options))
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 3, 3, 3]
    assert [e["usage"]["prompt_tokens"] for e in events] == [2] * 4


def test_choices_of_a_stream_keep_apart(make_server: MakeServer, tokenizer: Tokenizer) -> None:
    texts = {1: "😀 one", 2: "two 漢", 3: "3"}
    engine = FakeEngine(lambda _, p: [[t] for t in tokenizer.encode(texts[p.seed or 0])])
    events = events_of(make_server(engine).chat(stream=True, n=3, seed=1))
    assert texts_of(events) == {0: texts[1], 1: texts[2], 2: texts[3]}
    opened = [e["choices"][0]["index"] for e in events if "role" in e["choices"][0]["delta"]]
    assert sorted(opened) == [0, 1, 2]


def test_unusual_line_ends_do_not_break_a_stream(
    make_server: MakeServer, tokenizer: Tokenizer
) -> None:
    text = "a\u2028b\x85c\r\nd\x0b"
    server = make_server(FakeEngine(says(tokenizer.encode(text))))
    response = server.complete(stream=True)
    assert texts_of(events_of(response)) == {0: text}
    assert len(response.text.splitlines()) == 2 * response.text.count("data: ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"max_tokens": 195}, {}])
def test_too_long_is_refused_before_the_stream(
    server: Server, stream: bool, fields: dict[str, int]
) -> None:
    prompt = [1] * (10 if fields else 200)
    error = error_of(server.complete(prompt, stream=stream, **fields), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(len(prompt)) in error["message"] and "length" in error["message"]
    assert "200" in error["message"]
    assert not server.engine.running


def test_one_refused_prompt_stops_the_others(make_server: MakeServer) -> None:
    server = make_server(FakeEngine(says([0], [1])))
    response = server.complete([[1], [300], [2]], max_tokens=5)
    assert error_of(response, 400)["param"] == "prompt"
    assert len(server.engine.aborted) == 3 and not server.engine.running


@pytest.mark.parametrize("prompt", [[[1], [1] * 200, [2]], "a " * 100_000, ["a", "漢" * 60_000]])
def test_a_prompt_far_too_long_starts_nothing(server: Server, prompt: Any) -> None:
    error = error_of(server.complete(prompt, n=100, max_tokens=5), 400)
    assert error["code"] == "context_length_exceeded"
    assert "model length is 200" in error["message"]
    assert not server.engine.aborted and not server.engine.submitted


def test_an_empty_text_is_refused(server: Server) -> None:
    assert "empty" in error_of(server.complete(""), 400)["message"]


def test_what_the_template_refuses_is_a_400(server: Server) -> None:
    assert "no such talk" in error_of(server.chat("refuse me"), 400)["message"]
    error = error_of(server.chat(chat_template_kwargs={"tokenize": True}), 400)
    assert "may not set 'tokenize'" in error["message"]


def test_stop_tokens_outside_the_vocabulary(server: Server) -> None:
    error = error_of(server.chat(stop_token_ids=[299, 300]), 400)
    assert error["param"] == "stop_token_ids"
    assert "token 300 is outside the vocabulary of 300" in error["message"]


def test_options_at_fault_are_named(server: Server) -> None:
    for param, fields in (
        ("logit_bias", {"logit_bias": {"300": 1}}),
        ("min_tokens", {"min_tokens": 200}),
        ("max_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("max_tokens", {"max_tokens": 200}),
        ("stop_token_ids", {"stop_token_ids": list(range(33))}),
    ):
        for response in (server.chat(**fields), server.complete(**fields)):
            assert error_of(response, 400)["param"] == param
    assert error_of(server.complete(echo=True, logprobs=1), 400)["param"] == "echo"
    assert error_of(server.chat(top_logprobs=1), 400)["param"] == "top_logprobs"
    assert error_of(server.chat(stream_options={}), 400)["param"] == "stream_options"


def test_too_many_answers_at_once(server: Server) -> None:
    error = error_of(server.complete([[1]] * 20, n=100), 400)
    assert "20 prompts × n 100 exceed 1024" in error["message"]
    assert not server.engine.submitted


def test_another_model_is_not_found(server: Server) -> None:
    error = error_of(server.chat(model="gpt-4"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny'" in error["message"]


def test_an_error_in_mid_stream_is_an_event_and_the_end(make_server: MakeServer) -> None:
    server = make_server(FakeEngine(says([0], EngineDeadError("rank 3: out of memory"))))
    response = server.chat(stream=True)
    assert response.status_code == 200
    *chunks, last, end = response.text.split("\n\n")
    assert len(chunks) == 2 and end == ""
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["message"] == "the engine has ended: rank 3: out of memory"
    assert error["type"] == "server_error"


def test_an_error_before_the_whole_answer_is_a_503(make_server: MakeServer) -> None:
    server = make_server(FakeEngine(says([0], EngineDeadError("gone"))))
    assert error_of(server.chat(), 503)["code"] == "engine_dead"


@pytest.mark.parametrize("token", [-1, 2**40])
def test_a_token_that_cannot_be_decoded_fails_its_request_alone(
    make_server: MakeServer, token: int
) -> None:
    engine = FakeEngine(lambda prompt, _: [[0], [token if prompt == [66] else 1], [2]])
    server = make_server(engine)
    assert error_of(server.complete([66]), 500)["code"] == "internal"
    assert '"code":"internal"' in server.complete([66], stream=True).text
    assert len(engine.aborted) == 2 and not engine.running
    assert server.complete([65]).status_code == 200


def test_a_dead_engine_is_not_healthy(server: Server) -> None:
    server.engine.error = "RuntimeError: gone"
    health = server.get("/health")
    assert health.status_code == 503
    assert health.json() == {"status": "failed", "detail": "RuntimeError: gone"}
    assert "RuntimeError: gone" in error_of(server.chat(), 503)["message"]
    error_of(server.get("/v1/models"), 503)


def test_other_routes_and_methods_have_the_same_shape(server: Server) -> None:
    error = error_of(server.get("/v1/nothing"), 404)
    assert (error["message"], error["code"]) == ("Not Found: GET /v1/nothing", "not_found")
    response = server.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    error_of(server.get("/docs"), 404)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/tiny"])
def test_what_can_be_read_can_be_asked_for_its_head(server: Server, path: str) -> None:
    assert asyncio.run(server.ask("HEAD", path)).status_code == 200
