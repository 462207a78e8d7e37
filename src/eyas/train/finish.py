"""Stage 5: the chosen checkpoint as a folder of its own, with a card that says how it was made."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, cast

import torch

from eyas.contract.target import Target
from eyas.engine.load import load_draft, load_target
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import ModelConfig
from eyas.models.draft_config import read_draft_config
from eyas.train.export import export_draft
from eyas.train.journal import read_log
from eyas.train.pipeline_settings import PipelineSettings
from eyas.train.regenerate import REPORT_FILE, Report
from eyas.train.settings import TrainSettings
from eyas.train.workspace import Workspace

CARD_FILE = "README.md"
_DRAFT_FILES = ("config.json", "model.safetensors")


def export_best(
    files: Workspace,
    *,
    target: str,
    target_folder: Path,
    target_config: ModelConfig,
    settings: PipelineSettings,
    training: TrainSettings,
) -> None:
    """Write `files.draft`. Raises EyasError when the evaluation that chooses has not been run."""
    evaluation = files.read_json(files.evaluation, stage="evaluate")
    source = files.training / "checkpoints" / evaluation["checkpoint"]
    files.draft.mkdir(exist_ok=True)
    if settings.format == "specforge":  # what a checkpoint is
        for name in _DRAFT_FILES:
            shutil.copyfile(source / name, files.draft / name)
    else:
        _convert(source, files.draft, target, target_folder, target_config)
    files.write(files.draft / CARD_FILE, _card(files, target, evaluation, settings, training))


def _convert(
    source: Path, folder: Path, target_name: str, target_folder: Path, target_config: ModelConfig
) -> None:
    """Read a checkpoint as an engine does, and write it in speculators' layout."""
    device, dtype = torch.device("cpu"), torch.bfloat16
    target = load_target(
        target_config,
        Checkpoint.open(target_folder),
        dtype=dtype,
        device=device,
        max_model_len=1,
    )
    config = read_draft_config(source, target_config)
    draft = load_draft(config, str(source), target, dtype=dtype, device=device, max_model_len=1)
    export_draft(
        draft,
        folder,
        num_target_layers=cast(Target, target).num_layers,
        target_vocab_size=target_config.vocab_size,
        format="speculators",
        target_name=target_name,
    )


def _card(
    files: Workspace,
    target: str,
    evaluation: dict[str, Any],
    settings: PipelineSettings,
    training: TrainSettings,
) -> str:
    """The card, from what the stages wrote down."""
    state = files.read_json(files.data / REPORT_FILE, stage="regenerate")
    report = Report(seconds=state["seconds"])
    for group in state["shards"].values():
        report.add(group)
    vocabulary = files.read_json(files.vocabulary, stage="vocabulary")
    last = read_log(files.training)[-1]
    accuracy = ", ".join(f"{value:.3f}" for value in last["accuracy_by_step"])
    sources = "\n".join(f"| {name} | {n} |" for name, n in report.by_source.most_common())
    changed = _changed(settings, PipelineSettings()) | _changed(training, TrainSettings())
    options = ", ".join(f"{name} {value}" for name, value in changed.items()) or "none"
    return f"""# EAGLE-3 draft for {target}

Made by `eyas train` for the target {target}; use it with

    eyas serve {target} --draft {files.draft.name}

## Acceptance

Measured in the engine by `eyas train --stage evaluate`, {evaluation["num_prompts"]} prompts,
{settings.eval_tokens} new tokens at most; none of them was trained on.

{files.evaluation_table.read_text()}
## How it was made

* Data: {report.line()}; every answer is the target's own, {settings.greedy_share:.0%} of the
  conversations greedy, the others at temperatures from {settings.min_temperature:g} to
  {settings.max_temperature:g}.
* Vocabulary: {len(vocabulary["kept_ids"])} tokens, {vocabulary["coverage"]:.2%} of the answers'.
* Training: {evaluation["checkpoint"]} of {last["num_steps"]} steps, {last["tokens"]} tokens in all,
  {training.num_draft_steps} steps of training-time test; accuracy by step at the end {accuracy}.
* Settings other than the defaults: {options}.

| prompts | conversations |
|---|---|
{sources}
"""


def _changed(settings: Any, defaults: Any) -> dict[str, Any]:
    values, usual = dataclasses.asdict(settings), dataclasses.asdict(defaults)
    return {name: value for name, value in values.items() if value != usual[name]}
