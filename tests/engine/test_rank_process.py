"""Further ranks as processes: they come, obey, and are gone."""

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import DraftShape, TargetShape, write_draft, write_target

from eyas.config import EngineConfig
from eyas.engine import rank_leader
from eyas.engine.engine import Engine
from eyas.engine.load import load_engine
from eyas.engine.rank_leader import RankError, RankProcesses
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
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@contextlib.contextmanager
def ranks(settings: dict[str, Any], **changes: Any) -> Iterator[tuple[Engine, RankProcesses]]:
    """An engine on two ranks, ended afterwards."""
    config = EngineConfig(**settings, tensor_parallel_size=2, **changes)
    loaded = load_engine(config)
    worker = loaded.engine.worker
    assert isinstance(worker, LeadingWorker) and isinstance(worker.followers, RankProcesses)
    (pid,) = worker.followers.pids
    try:
        yield loaded.engine, worker.followers
    finally:
        worker.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_two_processes_say_what_one_says(settings: dict[str, Any]) -> None:
    wanted = say(load_engine(EngineConfig(**settings)).engine)
    with ranks(settings) as (engine, followers):
        assert say(engine) == wanted and len(set(wanted)) > 3
        # What a rank raises ends the run here too, with its own error.
        with pytest.raises(RankError) as raised:
            engine.worker.run(break_on, 1)
            for _ in range(1000):
                say(engine)
        text = str(raised.value)
        assert text.startswith(f"rank 1 (process {followers.pids[0]} on {socket.gethostname()})")
        assert "failed while serving: OutOfMemoryError: CUDA out of memory." in text
        assert "in break_on" in text  # the traceback
        assert text.endswith("hint: lower --max-batch-size, --kv-cache-tokens or --max-model-len")


def test_ranks_that_would_not_meet(settings: dict[str, Any]) -> None:
    """A trial on one of the devices has failed, for example."""
    with ranks(settings) as (_, followers):
        followers.wait_ready(["torch", "torch"])
        with pytest.raises(RankError, match="has chosen torch, torch for attention where rank 0"):
            followers.wait_ready(["triton", "triton"])


def test_a_rank_that_is_killed_while_idle(settings: dict[str, Any]) -> None:
    with ranks(settings) as (engine, followers):
        say(engine)
        reports: queue.SimpleQueue[str] = queue.SimpleQueue()
        followers.on_failure(reports.put)
        os.kill(followers.pids[0], signal.SIGKILL)
        report = reports.get(timeout=5)
        assert "failed while serving: killed by SIGKILL" in report
        assert "hint: the system does that when memory runs out" in report
        with pytest.raises(RankError):
            say(engine)


def test_a_rank_that_is_killed_while_it_answers(settings: dict[str, Any]) -> None:
    with ranks(settings) as (engine, followers):
        killer = threading.Timer(0.3, os.kill, (followers.pids[0], signal.SIGKILL))
        killer.start()
        with pytest.raises(RankError, match="killed by SIGKILL"):
            while True:
                say(engine)
        assert killer.finished.is_set()


def test_a_rank_that_stands_still(settings: dict[str, Any]) -> None:
    """Its sockets stay open: only the time tells."""
    with ranks(settings, watchdog=4) as (engine, followers):
        say(engine)
        os.kill(followers.pids[0], signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(RankError) as raised:
            while True:
                say(engine)
        assert time.monotonic() - start < 4 + 5
        text = str(raised.value)
        assert "no progress for 4 s: rank 1" in text and "no sign of life for" in text


def test_a_rank_that_is_killed_while_it_loads(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(**settings, tensor_parallel_size=2)
    start = rank_leader._start

    def start_and_kill(number: int) -> Any:
        rank = start(number)
        threading.Timer(0.5, rank.process.kill).start()
        return rank

    monkeypatch.setattr(rank_leader, "_start", start_and_kill)
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 .* failed while starting: killed by SIGKILL"):
        load_engine(config)
    assert time.monotonic() - began < 0.5 + 5
