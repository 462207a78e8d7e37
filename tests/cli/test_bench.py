"""`eyas bench`."""

import json
from pathlib import Path

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
