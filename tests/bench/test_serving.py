"""The benchmark over HTTP against a server that does as it is told."""

import asyncio
import dataclasses
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures.stream_server import NUM_WARM_UP, StreamServer, running
from rich.console import Console

from eyas.bench import serving
from eyas.bench.http_client import RequestRecord, stream_chat
from eyas.bench.plot import plot_serving
from eyas.bench.serving import ServingSettings, arrivals, run_serving
from eyas.bench.serving_report import render, to_json
from eyas.bench.serving_results import Goals, ServingResult
from eyas.config import ConfigError
from eyas.types import EyasError


def serve_and_run(server: StreamServer, **changes: object) -> ServingResult:
    values = {"rates": (200.0,), "num_requests": 6, "max_tokens": 8}
    with running(server) as url:
        return run_serving(url, ServingSettings(**(values | changes)))


def prompts(folder: Path, texts: Sequence[str]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def test_every_answer_is_timed() -> None:
    server = StreamServer(pause=0.01, pairs=2)
    result = serve_and_run(server)
    (rate,) = result.rates
    assert result.ok and result.model == "numbers"
    assert (rate.num_requests, rate.num_whole, rate.errors) == (6, 6, {})
    assert (rate.num_tokens, rate.num_prompt_tokens, rate.num_cached_tokens) == (48, 60, 24)
    assert rate.first_token and rate.inter_token and rate.whole
    assert 0.01 < rate.first_token.p50 <= rate.first_token.p90 <= rate.first_token.p99
    assert 0.004 < rate.inter_token.p50 <= rate.inter_token.p90 <= rate.inter_token.p99
    assert 0.04 < rate.whole.p50
    assert rate.tokens_per_second == pytest.approx(48 / rate.seconds)
    assert rate.requests_per_second == pytest.approx(6 / rate.seconds)


def ask_once(server: StreamServer, **body: object) -> RequestRecord:
    """One request, on a clock that ticks whenever it is looked at."""
    ticks = itertools.count()
    asked = {"messages": [{"content": "fine"}], "max_tokens": 6} | body

    async def ask(url: str) -> RequestRecord:
        async with httpx.AsyncClient(base_url=url) as client:
            return await stream_chat(client, asked, planned=-1.0, now=lambda: float(next(ticks)))

    with running(server) as url:
        return asyncio.run(ask(url))


def test_tokens_that_come_together_share_their_time() -> None:
    record = ask_once(StreamServer(pairs=2))
    # Sent at 0; the role at 1, then three chunks, the usage, the end.
    assert (record.sent, record.first, record.last, record.ended) == (0, 2, 4, 6)
    assert record.gaps == [(1.0, 2), (1.0, 2)] and record.num_tokens == 6
    assert record.first_token_seconds == 3.0  # from when it was planned
    assert record.mean_inter_token_seconds == 0.5
    alone = ask_once(StreamServer(pairs=6))
    assert alone.gaps == [] and alone.mean_inter_token_seconds == 0


def test_arrivals_do_not_wait_for_answers() -> None:
    server = StreamServer(gate=8)  # no answer before all have come
    (rate,) = serve_and_run(server, rates=(500.0,), num_requests=8, max_tokens=4).rates
    assert server.most_running == 8 and rate.num_whole == 8


def test_arrivals_are_poisson_and_repeatable() -> None:
    times = arrivals(4.0, 4000, seed=1)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0 and mean == pytest.approx(0.25, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.1)  # of the exponential distribution
    assert times == arrivals(4.0, 4000, seed=1) != arrivals(4.0, 4000, seed=2)


def test_requests_go_out_at_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[float, float]] = []

    async def note(client: object, body: object, *, planned: float, now: Any) -> RequestRecord:
        sent.append((planned, now()))
        return RequestRecord(planned)

    monkeypatch.setattr(serving, "stream_chat", note)
    times = arrivals(200.0, 20, seed=3)
    asyncio.run(serving._send(None, [{}] * 20, times, lambda: None))  # type: ignore[arg-type]
    assert [planned for planned, _ in sent] == times
    assert all(at >= planned - 1e-3 for planned, at in sent)  # none early


def test_what_is_sent(tmp_path: Path) -> None:
    server = StreamServer()
    path = prompts(tmp_path, ["one", "two"])
    serve_and_run(
        server,
        prompts_file=path,
        num_requests=3,
        temperature=0.5,
        ignore_eos=True,
        seed=7,
        rates=(1000.0, 500.0),
    )
    bodies = server.bodies[NUM_WARM_UP:]
    assert [body["messages"][0]["content"] for body in bodies[:3]] == ["one", "two", "one"]
    assert len(bodies) == 6 and bodies[3:] == bodies[:3]
    assert [body["seed"] for body in bodies[:3]] == [7, 8, 9]
    first = bodies[0]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("numbers", 8, 0.5)
    assert first["stream"] and first["ignore_eos"]


def test_built_in_prompts_differ() -> None:
    settings = ServingSettings(num_requests=20)
    found = [one[0]["content"] for run in (0, 1) for one in settings.conversations(run)]
    assert len(set(found)) == 40


def test_errors_are_counted_by_kind(tmp_path: Path) -> None:
    path = prompts(tmp_path, ["fine", "do:fail", "do:break", "do:cut", "do:silent"])
    result = serve_and_run(StreamServer(), prompts_file=path, num_requests=10)
    (rate,) = result.rates
    assert not result.ok and rate.num_whole == 2
    assert rate.errors == {
        "HTTP 500": 2,
        "error event: server_error": 2,
        "the stream ended early": 2,
        "no token": 2,
    }
    assert rate.num_tokens == 16


def test_a_server_that_dies_in_between() -> None:
    class Dying(StreamServer):
        async def _answer(self, writer: object, body: dict[str, object]) -> None:
            if len(self.bodies) > NUM_WARM_UP:
                writer.transport.abort()  # type: ignore[attr-defined]
                return
            await super()._answer(writer, body)  # type: ignore[arg-type]

    (rate,) = serve_and_run(Dying(), num_requests=2).rates
    assert rate.num_whole == 0 and sum(rate.errors.values()) == 2
    assert rate.first_token is None and rate.goodput == 0


def test_goodput() -> None:
    server = StreamServer(pause=0.02)
    (all_good,) = serve_and_run(server, goals=Goals(5.0, 1.0)).rates
    assert all_good.goodput == all_good.requests_per_second
    (too_slow,) = serve_and_run(server, goals=Goals(5.0, 0.01)).rates
    (too_late,) = serve_and_run(server, goals=Goals(0.01, 1.0)).rates
    assert too_slow.goodput == too_late.goodput == 0


def test_tokens_without_usage_are_counted_by_chunk() -> None:
    (rate,) = serve_and_run(StreamServer(tells_usage=False)).rates
    assert rate.num_tokens == 48 and rate.inter_token is not None


METRICS = "# HELP x\neyas_round_requests_total {n}0\neyas_round_tokens_total {n}5\n"


def test_acceptance_is_the_servers_own() -> None:
    server = StreamServer()
    server.metrics = "eyas_round_requests_total {n}\neyas_round_tokens_total {n}00.0\n"
    (rate,) = serve_and_run(server).rates
    # 2 and 8 requests seen: 6 rounds, 600 tokens.
    assert rate.acceptance.length == pytest.approx(100.0)
    assert rate.acceptance.num_looping == 0


def test_looping_output_has_no_acceptance(tmp_path: Path) -> None:
    server = StreamServer()
    server.metrics = METRICS
    path = prompts(tmp_path, ["fine", "do:loop"])
    result = serve_and_run(server, prompts_file=path, max_tokens=80)
    acceptance = result.rates[0].acceptance
    assert (acceptance.length, acceptance.num_looping, acceptance.num_outputs) == (None, 3, 6)
    assert "3 of 6 outputs repeat themselves; no acceptance is given" in rendered(result)
    assert "looped" in rendered(result)


def test_no_metrics_no_acceptance() -> None:
    (rate,) = serve_and_run(StreamServer()).rates
    assert rate.acceptance.length is None


def rendered(result: ServingResult, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    render(result, console)
    return console.export_text()


@pytest.mark.parametrize("width", [110, 160])
def test_table(tmp_path: Path, width: int) -> None:
    path = prompts(tmp_path, ["fine", "do:fail"])
    result = serve_and_run(StreamServer(), prompts_file=path, rates=(100.0, 200.0))
    text = rendered(result, width)
    assert "…" not in text
    assert "3 of 6 requests failed: HTTP 500 (3)" in text
    assert "the prefix cache had 40% of the prompts' tokens" in text
    late = dataclasses.replace(result.rates[0], client_lag=0.5)
    assert "500 ms late" in rendered(dataclasses.replace(result, rates=(late,)))


def test_json() -> None:
    result = serve_and_run(StreamServer(), rates=(100.0, 200.0))
    data = json.loads(to_json(result, command="eyas bench serving x"))
    assert data["command"] == "eyas bench serving x" and data["ok"]
    assert [rate["rate"] for rate in data["rates"]] == [100.0, 200.0]
    assert data["rates"][0]["first_token"]["p99"] > 0


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = serve_and_run(StreamServer(), rates=(100.0, 200.0))
    empty = dataclasses.replace(result.rates[0], first_token=None)
    plot_serving(dataclasses.replace(result, rates=(empty, result.rates[1])), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_no_server() -> None:
    with pytest.raises(EyasError, match="does not answer as a server of models"):
        run_serving("http://127.0.0.1:1", ServingSettings())


def test_a_server_that_wants_a_key() -> None:
    class Locked(StreamServer):
        async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            writer.close()

    with pytest.raises(EyasError, match="/v1/models gave 401, give --api-key$"):
        serve_and_run(Locked())


def test_a_server_that_fails_at_once() -> None:
    class Failing(StreamServer):
        async def _answer(self, writer: object, body: dict[str, object]) -> None:
            body["messages"] = [{"content": "do:fail"}]
            await super()._answer(writer, body)  # type: ignore[arg-type]

    with pytest.raises(EyasError, match=r"the first request failed \(HTTP 500\)"):
        serve_and_run(Failing())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rates": ()}, "--rate must be above 0"),
        ({"rates": (1.0, 0.0)}, "--rate must be above 0"),
        ({"num_requests": 0}, "--num-requests must"),
        ({"max_tokens": 0}, "--max-tokens must"),
        ({"temperature": -1.0}, "--temperature must"),
        ({"goals": Goals(0.0, 1.0)}, "--first-token-goal"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServingSettings(**changes)


def test_a_file_without_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(EyasError, match="holds no prompts"):
        ServingSettings(prompts_file=tmp_path / "empty").conversations(0)
