"""A run that is stopped and goes on is the run that was not stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.tiny import tiny_target
from fixtures.training import Talk, random_talks, settings
from safetensors.torch import load_file

from eyas.train.draft import design_draft
from eyas.train.journal import TrainProgress, read_log
from eyas.train.state import STATE_FILE, find_checkpoints
from eyas.train.trainer import TrainResult, train
from eyas.types import EyasError

KEPT = torch.arange(0, 64, 2)
OPTIONS = settings(num_steps=20, log_every=4, checkpoint_every=10, num_draft_steps=2)


def run(out_dir: Path, talks: list[Talk] | None = None, **changes: Any) -> TrainResult:
    target = tiny_target()
    options: dict[str, Any] = {"kept_ids": KEPT, "settings": OPTIONS, "export_dtype": torch.float32}
    config = design_draft(target.config, len(KEPT))
    records = talks or random_talks(9)
    return train(target, config, records=records, out_dir=out_dir, **options | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps at once."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


def log_without_times(folder: Path) -> list[dict[str, Any]]:
    times = ("tokens_per_second", "seconds_left")
    return [{k: v for k, v in line.items() if k not in times} for line in read_log(folder)]


def test_twenty_steps_equal_ten_and_ten(whole: Path, tmp_path: Path) -> None:
    """Loss, accuracy, learning rate, data and weights, bit by bit."""
    first = run(tmp_path, stop_at=10)
    assert first.step == 10 and list(find_checkpoints(tmp_path)) == [10]
    second = run(tmp_path)
    assert second.step == 20 and second.last is not None and second.last.step == 20
    assert log_without_times(tmp_path) == log_without_times(whole)
    assert [line["step"] for line in read_log(whole)] == [4, 8, 10, 12, 16, 20]
    for step in (10, 20):
        ours, theirs = (
            load_file(find_checkpoints(folder)[step] / "model.safetensors")
            for folder in (tmp_path, whole)
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    states = [
        torch.load(find_checkpoints(folder)[20] / STATE_FILE, weights_only=True)
        for folder in (tmp_path, whole)
    ]
    assert torch.equal(states[0]["master"], states[1]["master"])
    moments = [state["optimizer"]["state"][0] for state in states]
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])


def test_interrupted_between_checkpoints(whole: Path, tmp_path: Path) -> None:
    """Steps past the last checkpoint are done again; their log lines are not kept twice."""

    def stop(progress: TrainProgress) -> None:
        if progress.step == 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, progress=stop)
    assert [line["step"] for line in read_log(tmp_path)] == [4, 8, 10, 12, 16]
    (tmp_path / "checkpoints" / ".unfinished-000020").mkdir()  # died while writing
    run(tmp_path)
    assert log_without_times(tmp_path) == log_without_times(whole)


def test_a_finished_run_is_left_alone(whole: Path) -> None:
    before = read_log(whole)
    result = run(whole)
    assert result.step == 20 and result.last is None and read_log(whole) == before


def test_only_the_newest_keeps_its_state(whole: Path) -> None:
    found = find_checkpoints(whole)
    assert [(folder / STATE_FILE).exists() for folder in found.values()] == [False, True]
    assert all((folder / "config.json").exists() for folder in found.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": settings(num_steps=30, num_draft_steps=2)}, "num_steps was 20, is 30"),
        (
            {"settings": settings(num_steps=20, num_draft_steps=2, learning_rate=0.1, seed=3)},
            "learning_rate was 0.003, is 0.1; seed was 0, is 3",
        ),
        ({"talks": random_talks(8)}, "another corpus"),
        ({"kept_ids": KEPT + 1}, "another kept_ids"),
    ],
)
def test_another_run_is_refused(whole: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EyasError, match=words):
        run(whole, **changes)


def test_what_only_reports_may_change(whole: Path) -> None:
    quiet = settings(num_steps=20, num_draft_steps=2, log_every=3, checkpoint_every=7)
    assert run(whole, settings=quiet).step == 20


def test_state_is_plain_data(whole: Path) -> None:
    """It can be read without running anyone's code."""
    state = torch.load(find_checkpoints(whole)[20] / STATE_FILE, weights_only=True)
    assert state["step"] == 20 and state["num_tokens"] == read_log(whole)[-1]["tokens"]
    json.dumps(state["identity"])
