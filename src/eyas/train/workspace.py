"""The folder of a training, and what a stage tells while it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

from eyas.types import EyasError


class Reporter(Protocol):
    """Shows people how far things are."""

    def update(self, step: str, done: int, total: int, note: str = "") -> None:
        """`done` of `total` of a step are behind us; note: more about it, in a few words."""

    def say(self, line: str) -> None:
        """A line that stays."""


class Silent:
    """The Reporter of a process beside the first."""

    def update(self, step: str, done: int, total: int, note: str = "") -> None:
        """Says nothing."""

    def say(self, line: str) -> None:
        """Says nothing."""


class Workspace:
    """Paths of one training. Files appear under their names complete or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EyasError(f"--out {folder} cannot be made: {error}") from error
        self.prompts = folder / "prompts.jsonl.gz"
        self.settings = folder / "settings.json"
        self.selection = folder / "selection.json"
        self.self_prompts = folder / "self_prompts.jsonl.gz"
        self.validation_prompts = folder / "validation.jsonl.gz"
        self.data = folder / "data"
        self.vocabulary = folder / "vocabulary.json"
        self.training = folder / "training"
        self.validation = folder / "validation.json"
        self.evaluation = folder / "evaluation.json"
        self.evaluation_table = folder / "evaluation.md"
        self.draft = folder / "draft"

    def write(self, path: Path, text: str) -> None:
        """Write a small file in one step."""
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(text)
        unfinished.rename(path)

    def write_json(self, path: Path, data: Any) -> None:
        """Write JSON in one step."""
        self.write(path, json.dumps(data, indent=1) + "\n")

    def read_json(self, path: Path, *, stage: str) -> Any:
        """JSON that `stage` wrote. Raises EyasError that names the stage when there is none."""
        self.require(path, stage=stage)
        return json.loads(path.read_text())

    def record(self, stage: str, settings: dict[str, Any]) -> None:
        """Note what a stage ran with, for the card: a later call may have other settings."""
        self.write_json(self.settings, {**self._recorded(), stage: settings})

    def recorded(self, stage: str) -> dict[str, Any]:
        """What a stage ran with; nothing if it did not run."""
        found: dict[str, Any] = self._recorded().get(stage, {})
        return found

    def _recorded(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.settings.exists():
            found = json.loads(self.settings.read_text())
        return found

    def require(self, path: Path, *, stage: str) -> None:
        """Raises EyasError that names the stage to run first when `path` is missing."""
        if not path.exists():
            raise EyasError(f"{path} is missing: run --stage {stage} first")
