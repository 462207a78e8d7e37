"""`eyas bench`."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.command_line import run
from fixtures.stream_server import StreamServer, running


def test_bench_writes_its_json(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    settings = ("--new-tokens", 8, "--prompt-tokens", 32, "--repeats", 1, "--batch", "1,2")
    ran = run("bench", "offline", pair[0], *settings, "--json", path)
    assert ran.code == 0, ran.err
    assert "batch 2" in ran.out
    assert [batch["batch_size"] for batch in json.loads(path.read_text())["batches"]] == [1, 2]
    ran = run("bench", "offline", pair[0], *settings, "--json", tmp_path / "no" / "folder")
    assert ran.code == 1 and "cannot be written" in ran.err


def test_bench_of_a_shape(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    settings = ("--new-tokens", 16, "--prompt-tokens", 8, "--repeats", 1, "--batch", "1,2")
    more = ("--no-profile", "--threads", 1, "--device", "cpu", "--dtype", "float32")
    ran = run("bench", "offline", "--shape", "tiny", *settings, *more, "--json", path)
    assert ran.code == 0, ran.err
    assert "plain" in ran.out and "chain-3" in ran.out
    data = json.loads(path.read_text())
    assert [(t["rounds"], t["batch_size"]) for t in data["times"]] == [
        *(("plain", 1), ("plain", 2), ("chain-3", 1), ("chain-3", 2))
    ]
    assert data["prompt_tokens"] == [8] and data["repeats"] == 1


def test_bench_draws(pair: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "result.png"
    settings = ("--new-tokens", 8, "--prompt-tokens", 32, "--repeats", 1)
    ran = run("bench", "offline", pair[0], *settings, "--plot", picture)
    assert ran.code == 0, ran.err
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_bench_of_a_running_server(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    settings = ("--rate", "100,200", "--num-requests", 4, "--max-tokens", 3, "--json", path)
    server = StreamServer()
    with running(server) as url:
        ran = run("bench", "serving", url, *settings, "--api-key", "k", "--temperature", 0.5)
    assert ran.code == 0, ran.err
    assert "open-loop Poisson arrivals" in ran.out
    data = json.loads(path.read_text())
    assert [rate["num_tokens"] for rate in data["rates"]] == [12, 12]
    assert server.bodies[-1]["temperature"] == 0.5


def test_failed_requests_exit_with_2(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"prompt": "do:cut"}\n')
    with running(StreamServer()) as url:
        ran = run("bench", "serving", url, "--prompts", prompts, "--num-requests", 2)
    assert ran.code == 2 and "1 of 2 requests failed" in ran.out


def test_bench_starts_and_stops_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    @contextlib.contextmanager
    def start(model: str, flags: list[str], *, progress: object) -> Iterator[str]:
        seen.append((model, flags))
        with running(StreamServer()) as url:
            yield url
        seen.append("stopped")

    monkeypatch.setattr("eyas.bench.server_process.running_server", start)
    settings = ("--num-requests", 2, "--max-tokens", 4, "--rate", 50)
    ran = run("bench", "serving", "a/model", *settings, "--", "--topk", 2, "--draft", "d")
    assert ran.code == 0, ran.err
    assert seen == [("a/model", ["--topk", "2", "--draft", "d"]), "stopped"]
