"""Stage 5: the chosen checkpoint as a folder of its own, with a card that says how it was made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import torch

from eyas.contract.target import Target
from eyas.engine.load import load_draft, load_target
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import ModelConfig
from eyas.models.draft_config import read_draft_config
from eyas.train.export import ExportFormat, export_draft
from eyas.train.journal import read_log
from eyas.train.regenerate import foreign_shards, read_report
from eyas.train.workspace import Workspace

CARD_FILE = "README.md"
_DRAFT_FILES = ("config.json", "model.safetensors")


def export_best(
    files: Workspace,
    *,
    target: str,
    target_folder: Path,
    target_config: ModelConfig,
    format: ExportFormat,
) -> None:
    """Write `files.draft`. Raises EyasError when the evaluation that chooses has not been run."""
    evaluation = files.read_json(files.evaluation, stage="evaluate")
    source = files.training / "checkpoints" / evaluation["checkpoint"]
    files.draft.mkdir(exist_ok=True)
    if format == "specforge":  # what a checkpoint is
        for name in _DRAFT_FILES:
            shutil.copyfile(source / name, files.draft / name)
    else:
        _convert(source, files.draft, target, target_folder, target_config)
    files.write(files.draft / CARD_FILE, _card(files, target, evaluation))


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


def _card(files: Workspace, target: str, evaluation: dict[str, Any]) -> str:
    """The card, from what the stages wrote down."""
    vocabulary = files.read_json(files.vocabulary, stage="vocabulary")
    last = read_log(files.training)[-1]
    accuracy = ", ".join(f"{value:.3f}" for value in last["accuracy_by_step"])
    settings = files.recorded("train")
    options = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"""# EAGLE-3 draft for {target}

Made by `eyas train` for the target {target}; use it with

    eyas serve {target} --draft {files.draft.name}

## Acceptance

Measured in the engine by `eyas train --stage evaluate`: {evaluation["num_prompts"]} prompts that
were not trained on, {evaluation["settings"]["max_new_tokens"]} new tokens at most.

{files.evaluation_table.read_text()}
## How it was made

* Data: {_data(files)}
* Vocabulary: {len(vocabulary["kept_ids"])} tokens, {vocabulary["coverage"]:.2%} of the answers'.
* Training: {evaluation["checkpoint"]} of {last["num_steps"]} steps, {last["tokens"]} tokens in all;
  accuracy by draft step at the end {accuracy}.
* Settings of the training: {options}.
"""


def _data(files: Workspace) -> str:
    """What the draft was trained on."""
    num_given = len(foreign_shards(files.data))
    given = f"{num_given} shard(s) of conversations that existed before." if num_given else ""
    report, used = read_report(files.data), files.recorded("regenerate")
    if report is None:
        return given
    sources = ", ".join(f"{name} {n}" for name, n in report.by_source.most_common())
    return (
        f"{report.line()}. Every answer is the target's own, {used['greedy_share']:.0%} of the "
        f"conversations greedy, the others at temperatures from {used['min_temperature']:g} to "
        f"{used['max_temperature']:g}. Conversations by prompt set: {sources}. {given}".rstrip()
    )
