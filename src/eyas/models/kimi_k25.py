"""Kimi-K2.5: a vision-language wrapper around a language model of DeepSeek-V3's shape.

The wrapper names its inner model and gets the whole target interface by delegation (D4).
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from eyas.contract.target import wrapper_of
from eyas.models.config import ModelConfig
from eyas.models.deepseek_v3 import DeepseekV3ForCausalLM
from eyas.models.weight_slots import StoredNames

_INNER = "language_model"
_VISION = "images are not served yet; text does not need it"
# As transformers keeps it in memory: the whole under `model.`, the head outside.
_VARIANTS = (
    (re.compile(rf"model\.{_INNER}\.(model\.)?(?!lm_head\.)"), f"{_INNER}.model."),
    (re.compile(rf"(model\.{_INNER}\.)?lm_head\."), f"{_INNER}.lm_head."),
    (re.compile(r"model\.(?=(vision_tower|mm_projector|multi_modal_projector)\.)"), ""),
)


def published_name(name: str) -> str:
    """A stored name as the published checkpoint spells it."""
    for pattern, prefix in _VARIANTS:
        match = pattern.match(name)
        if match is not None:
            return prefix + name[match.end() :]
    return name


class KimiK25ForConditionalGeneration(wrapper_of(_INNER), nn.Module):  # type: ignore[misc]
    """The language model under its wrapper's names. config: of the language model."""

    def __init__(self, config: ModelConfig, **kwargs: Any) -> None:
        super().__init__()
        self.language_model = DeepseekV3ForCausalLM(config, **kwargs)

    def stored_names(self) -> StoredNames:
        """The published layout and its variants; vision weights are known and not read."""
        inner = self.language_model.stored_names().ignored
        vision = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
        ignored = {f"{_INNER}.{prefix}": reason for prefix, reason in inner.items()}
        return StoredNames(published_name, ignored | dict.fromkeys(vision, _VISION))
