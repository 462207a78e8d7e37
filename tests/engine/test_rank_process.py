"""Further ranks as processes: they come, obey, and are gone."""

from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import DraftShape, TargetShape, write_draft, write_target

from eyas.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.load import load_engine
from eyas.engine.rank_process import RankError, RankProcesses
from eyas.engine.ranks import LeadingWorker
from eyas.engine.worker import Worker
from eyas.types import SamplingParams


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    write_target(tmp_path / "target", TargetShape(num_layers=4))
    (tmp_path / "target/tokenizer.json").write_text("{}")
    write_draft(tmp_path / "draft", DraftShape())
    return {
        "model": str(tmp_path / "target"),
        "draft": str(tmp_path / "draft"),
        "draft_boundaries": (1, 2, 4),
        "device": "cpu",
        "max_model_len": 96,
        "max_batch_size": 2,
    }


def say(engine: Engine) -> list[int]:
    engine.add("x", [3 * i % 250 for i in range(30)], SamplingParams(max_tokens=12, seed=4))
    said: list[int] = []
    while engine.has_work:
        said += [token for output in engine.step() for token in output.new_token_ids]
    return said


def break_on(worker: Worker, rank: int) -> None:
    """Raise on one rank."""
    if (0 if isinstance(worker, LeadingWorker) else 1) == rank:
        raise ZeroDivisionError("a bug of rank 1")


def test_two_processes_say_what_one_says(settings: dict[str, Any]) -> None:
    alone = load_engine(EngineConfig(**settings)).engine
    wanted = say(alone)
    loaded = load_engine(EngineConfig(**settings, tensor_parallel_size=2, draft_dtype="float32"))
    engine, worker = loaded.engine, loaded.engine.worker
    assert isinstance(worker, LeadingWorker) and isinstance(worker.followers, RankProcesses)
    (rank,) = worker.followers._ranks
    try:
        assert "ranks" in loaded.report.facts
        assert say(engine) == wanted and len(set(wanted)) > 3
        # What a rank raises ends the run here too, with its own error.
        with pytest.raises(RankError) as raised:
            worker.run(break_on, 1)
            for _ in range(100):
                say(engine)
        text = str(raised.value)
        assert text.startswith(f"rank 1 (process {rank.process.pid}) failed while serving: ")
        assert "ZeroDivisionError: a bug of rank 1" in text
    finally:
        worker.close()
    assert rank.process.poll() is not None
