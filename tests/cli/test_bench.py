"""`eyas bench`."""

import json
from pathlib import Path

import pytest
from fixtures.command_line import run


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
    assert data["prompt_tokens"] == 8 and data["repeats"] == 1


def test_bench_draws(pair: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "result.png"
    settings = ("--new-tokens", 8, "--prompt-tokens", 32, "--repeats", 1)
    ran = run("bench", "offline", pair[0], *settings, "--plot", picture)
    assert ran.code == 0, ran.err
    assert picture.read_bytes()[:4] == b"\x89PNG"
