"""Names of a vision tower's weights: the published ones, and those of transformers in memory.

transformers takes queries, keys and values apart and stores rotated pairs in another order, which
`VisionConfig.halves` tells the tower.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

VISION_PREFIXES = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
_OUTER = "model."
_TOWER, _BLOCKS = r"vision_tower\.layers\.(\d+)\.", r"vision_tower.encoder.blocks.\1."
_VARIANTS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (rf"{_TOWER}norm1\.", rf"{_BLOCKS}norm0."),
        (rf"{_TOWER}norm2\.", rf"{_BLOCKS}norm1."),
        (rf"{_TOWER}mlp\.fc1\.", rf"{_BLOCKS}mlp.fc0."),
        (rf"{_TOWER}mlp\.fc2\.", rf"{_BLOCKS}mlp.fc1."),
        (rf"{_TOWER}attn\.proj\.", rf"{_BLOCKS}wo."),
        (_TOWER, _BLOCKS),
        # As transformers 5.24 saves it.
        (r"vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
        (r"vision_tower\.final_layernorm\.", "vision_tower.encoder.final_layernorm."),
        (
            r"vision_tower\.patch_embed\.pos_emb\.position_embeddings$",
            "vision_tower.patch_embed.pos_emb.weight",
        ),
        (r"mm_projector\.in_proj\.", "mm_projector.proj.0."),
        (r"mm_projector\.out_proj\.", "mm_projector.proj.2."),
    )
)


def published_vision_name(name: str) -> str:
    """A stored name as the published checkpoint spells it; other names stay as they are."""
    inner = name.removeprefix(_OUTER)
    if not inner.startswith(VISION_PREFIXES):
        return name
    for pattern, published in _VARIANTS:
        match = pattern.match(inner)
        if match is not None:
            return match.expand(published) + inner[match.end() :]
    return inner


def stored_vision(names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's names that belong to the vision part, without an outer `model.`."""
    inner = (name.removeprefix(_OUTER) for name in names)
    return [name for name in inner if name.startswith(VISION_PREFIXES)]
