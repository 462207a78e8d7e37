"""What operators ask: metrics, keys, request ids and the log; and the tokenizer's routes."""

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.fake_engine import FakeEngine, says
from fixtures.http_server import Server

from eyas.engine.async_engine import EngineDeadError
from eyas.engine.stats import EngineCounters, RoundTimes
from eyas.engine.tokenizer import Tokenizer
from eyas.server.log_format import _JsonFormatter, _TextFormatter
from eyas.types import StepOutput

MakeServer = Callable[..., Server]


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    return make_server(FakeEngine(says([0], [1, 2])))


def samples(server: Server) -> dict[str, float]:
    """The metrics by name with labels."""
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def requests(found: dict[str, float]) -> dict[str, float]:
    pattern = re.compile(r'eyas_requests_total\{endpoint="/v1/(.+)",outcome="(.+)"\}')
    matches = [(pattern.fullmatch(name), value) for name, value in found.items()]
    return {f"{m[1]} {m[2]}": value for m, value in matches if m}


def test_requests_are_counted_by_outcome(make_server: MakeServer) -> None:
    dead = EngineDeadError("gone")
    engine = FakeEngine(lambda prompt, _: [[0], dead] if prompt == [66] else [[0], [1, 2]])
    server = make_server(engine)
    for stream in (False, True):
        server.chat(stream=stream, n=2)
        server.complete([1, 2], stream=stream)
        server.complete([66], stream=stream)
        server.complete(stream=stream, temperature=-1)
    found = samples(server)
    assert requests(found) == {
        "chat/completions ok": 2,
        "completions ok": 2,
        "completions error": 2,
        "completions refused": 2,
    }
    assert found['eyas_answers_total{finish_reason="length"}'] == 6
    num_chat = len("user: a\nassistant: ")
    assert found["eyas_prompt_tokens_total"] == 2 * (num_chat + 2 + 1)
    assert found["eyas_generation_tokens_total"] == 6 * 3 + 2
    assert found["eyas_time_to_first_token_seconds_count"] == 6 + 2
    assert found["eyas_inter_token_seconds_count"] == 6 * 2
    assert found["eyas_request_seconds_count"] == 8


def test_prefix_hits_are_counted_by_tokens(make_server: MakeServer) -> None:
    server = make_server(FakeEngine(says(StepOutput("", (5,), num_cached_tokens=16))))
    server.complete([1] * 20)
    server.complete([1] * 20, stream=True)
    found = samples(server)
    assert found["eyas_prefix_cache_hit_tokens_total"] == 32
    assert found["eyas_prefix_cache_queried_tokens_total"] == 40


def test_the_engine_is_seen_through_its_counters(server: Server) -> None:
    times = RoundTimes(5, {"draft": 1.5, "verify": 2.5, "round": 4.25, "host": 0.5})
    server.engine.counters = EngineCounters(
        rounds={(4, "chain-2"): times},
        num_drafted=[10, 10],
        num_accepted=[8, 4],
        num_round_requests=10,
        num_round_tokens=22,
        num_preemptions=3,
    )
    found = samples(server)
    assert found["eyas_kv_pages_used"] == 2
    assert found["eyas_kv_use_ratio"] == pytest.approx(2 / 9)
    assert (found["eyas_requests_running"], found["eyas_requests_waiting"]) == (0, 0)
    assert found['eyas_acceptance_rate{position="1"}'] == 0.8
    assert found['eyas_acceptance_rate{position="2"}'] == 0.4
    assert found['eyas_draft_tokens_total{position="2"}'] == 10
    assert found["eyas_acceptance_length"] == 2.2
    assert found["eyas_preemptions_total"] == 3
    assert found['eyas_rounds_total{batch="4",shape="chain-2"}'] == 5
    seconds = 'eyas_round_seconds_total{{batch="4",part="{}",shape="chain-2"}}'
    parts = [found[seconds.format(part)] for part in ("draft", "verify", "round", "host")]
    assert parts == [1.5, 2.5, 4.25, 0.5]


def test_metrics_are_there_before_the_engine(server: Server) -> None:
    assert samples(server)["eyas_ready"] == 1
    server.state._service = None
    server.state.warm_up()
    found = samples(server)
    assert found["eyas_ready"] == 0 and "eyas_kv_pages" not in found


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Basic one", 401),
        ("one", 401),
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Bearer ön", 401),
        ("Bearer schlüsselÅ", 200),  # its last byte is a space in Latin-1
    ],
)
def test_keys(make_server: MakeServer, given: str | None, status: int) -> None:
    server = make_server(FakeEngine(says([0])), api_keys=("one", "two", "schlüsselÅ"))
    headers = {} if given is None else {"authorization": given.encode()}
    for path in ("/v1/models", "/openapi.json"):
        response = server.get(path, headers=headers)
        assert response.status_code == status
    if status == 401:
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert response.headers["www-authenticate"] == "Bearer"
    body = json.dumps({"prompt": [1]}).encode()
    assert server.post("/v1/completions", body, headers=headers).status_code == status
    for path in ("/health", "/ready", "/metrics"):  # probes have no key
        assert server.get(path).status_code == 200


def test_request_ids_come_back(server: Server) -> None:
    own = server.get("/health").headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", own)
    given = server.get("/v1/models", headers={"x-request-id": "a-1"}).headers["x-request-id"]
    assert given == "a-1"
    for bad in ("a b", "x" * 65, 'a"b', ""):
        told = server.get("/v1/models", headers={"x-request-id": bad}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", told)


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[logging.Formatter], list[str]]:
    """Lines of the access log, written in a format as they come."""
    caplog.set_level(logging.INFO)

    def start(formatter: logging.Formatter) -> list[str]:
        lines: list[str] = []

        def emit(record: logging.LogRecord) -> None:
            if record.name.startswith("eyas"):
                lines.append(formatter.format(record))

        monkeypatch.setattr(caplog.handler, "emit", emit)  # the handler is that of all tests
        return lines

    return start


def test_a_line_a_request_without_what_was_asked(
    server: Server, log: Callable[[logging.Formatter], list[str]]
) -> None:
    lines = log(_TextFormatter())
    server.chat("my secret", logprobs=True)
    server.complete("my secret", stream=True)
    server.complete("my secret", top_p="my secret")
    server.complete(**{"my secret": 1})
    server.get("/v1/a%0Ab")
    server.get("/health")
    assert len(lines) == 5
    assert "secret" not in "".join(lines)
    assert re.search(
        r"INFO POST '/v1/chat/completions' 200 seconds=[\d.]+ prompt_tokens=27 cached_tokens=0 "
        r"completion_tokens=3 outcome=ok request=[0-9a-f]{32}$",
        lines[0],
    )
    assert "completion_tokens=3 outcome=ok" in lines[1]
    assert "'/v1/completions' 400" in lines[2] and "error=invalid_value:top_p" in lines[2]
    assert all("\n" not in line for line in lines)


def test_what_went_wrong_in_a_stream_is_in_its_line(
    make_server: MakeServer, log: Callable[[logging.Formatter], list[str]]
) -> None:
    lines = log(_TextFormatter())
    make_server(FakeEngine(says([0], EngineDeadError("gone")))).complete([1], stream=True)
    assert "200" in lines[-1] and "outcome=error error=engine_dead" in lines[-1]


def test_the_log_as_json(
    make_server: MakeServer, log: Callable[[logging.Formatter], list[str]]
) -> None:
    lines = log(_JsonFormatter())
    server = make_server(FakeEngine(says([0], RuntimeError("odd"))))
    server.complete([1, 2], headers={"x-request-id": "r1"})
    error, access = map(json.loads, lines)
    assert (error["level"], error["message"]) == ("error", "a request failed")
    assert "RuntimeError: odd" in error["traceback"]
    assert error["request_id"] == access["request_id"] == "r1"
    assert (access["status"], access["path"]) == (500, "/v1/completions")
    assert (access["prompt_tokens"], access["outcome"]) == (2, "error")
    assert access["time"].endswith("+00:00")


def post(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    response = server.post(path, body)
    return response.status_code, response.json()


def test_tokenize_and_detokenize(server: Server, tokenizer: Tokenizer) -> None:
    text = "the 😀漢"
    status, told = post(server, "/tokenize", prompt=text, model="tiny")
    assert status == 200
    assert told == {
        "count": len(tokenizer.encode(text)),
        "max_model_len": 200,
        "tokens": tokenizer.encode(text),
    }
    assert post(server, "/detokenize", tokens=told["tokens"]) == (200, {"prompt": text})
    messages = [{"role": "user", "content": "a"}]
    kwargs = {"mood": "?"}
    status, told = post(server, "/tokenize", messages=messages, chat_template_kwargs=kwargs)
    assert tokenizer.decode(told["tokens"]) == "user: a\nassistant?: "
    assert post(server, "/tokenize", prompt="")[1]["tokens"] == []
    assert post(server, "/detokenize", tokens=[]) == (200, {"prompt": ""})


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/tokenize", {}, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt: "),
        ("/tokenize", {"prompt": "a", "model": "other"}, "is not served"),
        ("/tokenize", {"prompt": "a", "odd": 1}, "unknown field(s): odd"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse me"}]}, "no such talk"),
        ("/detokenize", {"tokens": [-1]}, "token -1 is outside the vocabulary of 300"),
        ("/detokenize", {"tokens": [300]}, "token 300 is outside"),
        ("/detokenize", {"tokens": "a"}, "tokens: "),
        ("/detokenize", {}, "tokens: "),
    ],
)
def test_what_the_tokenizer_routes_refuse(
    server: Server, path: str, body: dict[str, Any], text: str
) -> None:
    status, told = post(server, path, **body)
    assert status in (400, 404)
    assert text in told["error"]["message"]
