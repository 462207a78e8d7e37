"""Settings of a training run."""

from __future__ import annotations

import dataclasses
from typing import Any

from eyas.config import MAX_TREE_NODES
from eyas.types import EyasError


def _setting(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a draft is trained. Raises EyasError on values that make no sense."""

    num_epochs: float = _setting(8.0, "Passes over the conversations, unless num_steps is given.")
    num_steps: int | None = _setting(None, "Optimizer steps.")
    num_draft_steps: int = _setting(
        7, "Length S of training-time test: drafts in a row that are trained."
    )
    step_decay: float = _setting(0.8, "Weight of draft step k in the loss is this to the power k.")
    require_kept_argmax: bool = _setting(
        True,
        "Leave out of the loss where the target's best token is not in the draft's vocabulary.",
    )
    learning_rate: float = _setting(1e-3, "Peak learning rate.")
    final_learning_rate_ratio: float = _setting(0.1, "Last learning rate over the peak.")
    warmup_ratio: float = _setting(0.03, "Share of the steps in which the learning rate rises.")
    clip_norm: float = _setting(0.5, "Gradients are scaled down to this norm.")
    tokens_per_step: int = _setting(16384, "Tokens of an optimizer step, all processes together.")
    tokens_per_batch: int = _setting(16384, "Tokens that one process runs at once.")
    max_length: int = _setting(2048, "Longer conversations are cut to this many tokens.")
    seed: int = _setting(0, "First weights and order of the data.")
    log_every: int = _setting(10, "Steps between two log lines.")
    checkpoint_every: int = _setting(200, "Steps between two checkpoints.")

    def __post_init__(self) -> None:
        positive = (
            *("num_epochs", "num_draft_steps", "step_decay", "learning_rate", "clip_norm"),
            *("tokens_per_step", "tokens_per_batch", "max_length", "log_every", "checkpoint_every"),
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise EyasError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.num_steps is not None and self.num_steps < 1:
            raise EyasError(f"num_steps must be at least 1, not {self.num_steps}")
        for name in ("step_decay", "final_learning_rate_ratio", "warmup_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise EyasError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if self.num_draft_steps > MAX_TREE_NODES:
            raise EyasError(f"num_draft_steps may be at most {MAX_TREE_NODES}")
        if self.max_length > self.tokens_per_batch:
            raise EyasError(
                f"max_length ({self.max_length}) must fit into tokens_per_batch "
                f"({self.tokens_per_batch})"
            )
        if self.tokens_per_step % self.tokens_per_batch:
            raise EyasError(
                f"tokens_per_step ({self.tokens_per_step}) must be a multiple of tokens_per_batch "
                f"({self.tokens_per_batch})"
            )

    @property
    def batches_per_step(self) -> int:
        """Batches of an optimizer step, all processes together."""
        return self.tokens_per_step // self.tokens_per_batch


# What may differ when a run is resumed: it changes no weight.
REPORTING_SETTINGS = ("log_every", "checkpoint_every")
