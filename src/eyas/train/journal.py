"""The log of a training run: one JSON object a line, and what a progress bar needs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

LOG_FILE = "log.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainProgress:
    """Means since the line before. loss: the weighted sum over draft steps that is minimised.

    loss_by_step: cross-entropies (nats). accuracy_by_step: share of trained rows at which the
    draft's best token is the target's best of its whole vocabulary. tokens: of conversations, so
    far. gradient_norm: of the last step, before clipping.
    """

    step: int
    num_steps: int
    epoch: int
    loss: float
    loss_by_step: tuple[float, ...]
    accuracy_by_step: tuple[float, ...]
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    seconds_left: float


def append_line(out_dir: Path, progress: TrainProgress) -> None:
    """Add a line to the log."""
    with (out_dir / LOG_FILE).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(progress)) + "\n")


def read_log(out_dir: Path) -> list[dict[str, Any]]:
    """All lines of a log; none when there is no log yet."""
    path = out_dir / LOG_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cut_log(out_dir: Path, step: int) -> None:
    """Drop the lines of steps after `step`, which a resumed run will do again."""
    kept = [line for line in read_log(out_dir) if line["step"] <= step]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    (out_dir / LOG_FILE).write_text(text)
