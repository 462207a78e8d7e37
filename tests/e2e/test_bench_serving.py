"""`eyas bench serving` against the real model, served."""

import json
from pathlib import Path

from fixtures.command_line import run
from fixtures.server_process import Process


def test_acceptance_comes_from_the_servers_counters(server: Process, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    settings = ("--num-requests", 3, "--max-tokens", 24, "--rate", 5, "--json", path)
    ran = run("bench", "serving", server.url, *settings)
    assert ran.code == 0, ran.err
    (rate,) = json.loads(path.read_text())["rates"]
    assert rate["num_whole"] == 3 and rate["num_tokens"] == 72
    assert rate["num_prompt_tokens"] > 300
    acceptance = rate["acceptance"]
    if not acceptance["num_looping"]:
        assert acceptance["length"] == 1.0  # this server has no draft
    assert 0 < rate["first_token"]["p50"] < rate["whole"]["p50"]
