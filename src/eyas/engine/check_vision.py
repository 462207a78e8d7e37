"""Whether a target's images can be served, and what its vision tower will be built as."""

from __future__ import annotations

import importlib.util

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import ModelConfig
from eyas.models.findings import Findings
from eyas.models.vision_config import with_stored_vision, without_vision


def served_vision(
    target: ModelConfig, checkpoint: Checkpoint | None, *, images: bool, findings: Findings
) -> ModelConfig:
    """The target with its vision part if images are wanted and can be served, else without it;
    what is in their way is a warning, for text can be served all the same."""
    if target.vision is None or not images:
        return without_vision(target)
    target = with_stored_vision(target, checkpoint, findings)
    if target.vision is not None and importlib.util.find_spec("PIL") is None:
        findings.warn(
            "target",
            "pillow-missing",
            "images need Pillow, which is not installed: text is served, requests with images are "
            "refused",
            "pip install 'eyas[vision]', or set --no-images to say so openly",
        )
        target = without_vision(target)
    return target


def describe_images(target: ModelConfig) -> str:
    """One line on how images are taken."""
    vision = target.vision
    if vision is None:
        return "refused"
    side = vision.max_side_patches * vision.patch_size
    return (
        f"{vision.token_size} × {vision.token_size} pixels a token, at most {vision.max_patches} "
        f"patches and {side} pixels a side, tower of {vision.num_layers} layers"
    )
