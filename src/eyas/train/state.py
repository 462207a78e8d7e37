"""Checkpoints of a training run: a draft that serves, and all that is needed to go on exactly.

The order of the data and the learning rate are functions of step and seed, and nothing else draws
random numbers, so weights, optimizer moments and the step are the whole state.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from eyas.train.draft import MasterWeights
from eyas.train.settings import REPORTING_SETTINGS, TrainSettings
from eyas.types import EyasError

STATE_FILE = "training_state.pt"
_NAME = re.compile(r"step-(\d+)")


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """What must be the same for a resumed run to be the same run. corpus: its fingerprint; draft:
    the draft's configuration; kept_ids: a digest of its vocabulary."""

    settings: dict[str, Any]
    num_steps: int
    corpus: str
    draft: str
    kept_ids: str

    @classmethod
    def of(
        cls, settings: TrainSettings, *, num_steps: int, corpus: str, draft: str, kept_ids: str
    ) -> RunIdentity:
        """The identity, without settings that only report."""
        chosen = dataclasses.asdict(settings)
        for name in (*REPORTING_SETTINGS, "num_epochs", "num_steps"):
            del chosen[name]
        return cls(chosen, num_steps, corpus, draft, kept_ids)

    def require_equal(self, stored: dict[str, Any], where: Path) -> None:
        """Raises EyasError that names each difference."""
        mine = dataclasses.asdict(self)
        old, new = stored.pop("settings"), mine.pop("settings")
        pairs = {name: (old.get(name), new[name]) for name in new}
        pairs |= {name: (stored.get(name), mine[name]) for name in mine}
        differences = [
            f"{name} was {a}, is {b}" if name in new or name == "num_steps" else f"another {name}"
            for name, (a, b) in pairs.items()
            if a != b
        ]
        if differences:
            raise EyasError(
                f"{where} belongs to another run ({'; '.join(differences)}): train into another "
                "folder, or with the same data and settings"
            )


def checkpoint_folder(out_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return out_dir / "checkpoints" / f"step-{step:06}"


def find_checkpoints(out_dir: Path) -> dict[int, Path]:
    """Folders of all whole checkpoints by step, ascending."""
    found = {}
    for folder in (out_dir / "checkpoints").glob("step-*"):
        match = _NAME.fullmatch(folder.name)
        if match:
            found[int(match[1])] = folder
    return dict(sorted(found.items()))


def save_state(
    folder: Path,
    *,
    step: int,
    num_tokens: int,
    master: MasterWeights,
    optimizer: torch.optim.Optimizer,
    identity: RunIdentity,
) -> None:
    """Write the training state into a folder. num_tokens: trained on so far."""
    state = {
        "step": step,
        "num_tokens": num_tokens,
        "master": master.flat.detach().cpu(),
        "layout": [(name, tuple(p.shape)) for name, p in master.parameters.items()],
        "optimizer": optimizer.state_dict(),
        "identity": dataclasses.asdict(identity),
    }
    torch.save(state, folder / STATE_FILE)


def load_state(
    folder: Path,
    *,
    master: MasterWeights,
    optimizer: torch.optim.Optimizer,
    identity: RunIdentity,
) -> tuple[int, int]:
    """Go back to a checkpoint's state; returns its step and the tokens trained on until then.

    Raises EyasError when it belongs to another run.
    """
    state = torch.load(folder / STATE_FILE, map_location=master.flat.device, weights_only=True)
    identity.require_equal(state["identity"], folder)
    layout = [(name, tuple(p.shape)) for name, p in master.parameters.items()]
    assert [(name, tuple(shape)) for name, shape in state["layout"]] == layout
    with torch.no_grad():
        master.flat.copy_(state["master"])
    optimizer.load_state_dict(state["optimizer"])
    master.publish()
    return int(state["step"]), int(state["num_tokens"])


def begin_checkpoint(out_dir: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into; it does not count until `finish_checkpoint`."""
    unfinished = out_dir / "checkpoints" / f".unfinished-{step:06}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def finish_checkpoint(out_dir: Path, step: int) -> Path:
    """Give the written folder its name, and drop the training state of older checkpoints (their
    drafts stay, to be compared)."""
    folder = checkpoint_folder(out_dir, step)
    shutil.rmtree(folder, ignore_errors=True)
    (out_dir / "checkpoints" / f".unfinished-{step:06}").rename(folder)
    for other_step, other in find_checkpoints(out_dir).items():
        if other_step < step:
            (other / STATE_FILE).unlink(missing_ok=True)
    return folder
