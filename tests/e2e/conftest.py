"""One server of the real model for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.server_process import SLOTS, Process


@pytest.fixture(scope="session")
def server(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("serve") / "log"
    flags = ["--dtype=float32", "--max-model-len=1024", f"--max-batch-size={SLOTS}"]
    running = Process(smollm2_dir, log, *flags, "--served-model-name=smollm2")
    try:
        seen = running.wait_for(status="ready")
        phases = [health["status"] for health in seen if health]
        # The first answer, to itself, may fall between two polls.
        assert [p for p in dict.fromkeys(phases) if p != "warming"] == [
            "checking",
            "loading",
            "ready",
        ], phases
        yield running
        assert running.stop() == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        running.process.kill()
        running.process.wait()
