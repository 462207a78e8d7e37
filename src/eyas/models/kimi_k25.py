"""Kimi-K2.5: a vision-language wrapper around a language model of DeepSeek-V3's shape.

The wrapper names its inner model and gets the whole target interface by delegation (D4).
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from eyas.contract.target import wrapper_of
from eyas.models.config import ModelConfig
from eyas.models.deepseek_v3 import DeepseekV3ForCausalLM
from eyas.models.vision_names import VISION_PREFIXES, published_vision_name
from eyas.models.vision_tower import MoonViT, PatchProjector
from eyas.models.weight_slots import StoredNames

_INNER = "language_model"
_NO_IMAGES = "images are not served; text does not need it"
_VARIANTS = (
    # As transformers keeps it in memory: the whole under `model.`, the head outside.
    (re.compile(rf"model\.{_INNER}\.(model\.)?(?!lm_head\.)"), f"{_INNER}.model."),
    (re.compile(rf"(model\.{_INNER}\.)?lm_head\."), f"{_INNER}.lm_head."),
    # As transformers 5.24 saves it, and as some quantizers do.
    (re.compile(rf"{_INNER}\.model\.blocks\."), f"{_INNER}.model.layers."),
    (re.compile(rf"{_INNER}\.(?=(layers|embed_tokens|norm)\.)"), f"{_INNER}.model."),
)


def published_name(name: str) -> str:
    """A stored name as the published checkpoint spells it."""
    for pattern, prefix in _VARIANTS:
        match = pattern.match(name)
        if match is not None:
            return prefix + name[match.end() :]
    return published_vision_name(name)


class KimiK25ForConditionalGeneration(wrapper_of(_INNER), nn.Module):  # type: ignore[misc]
    """The language model under its wrapper's names, and the vision tower where images are served.

    config: of the language model, with the vision part. Implements contract.vision.ImageEncoder.
    """

    def __init__(self, config: ModelConfig, **kwargs: Any) -> None:
        super().__init__()
        self.language_model = DeepseekV3ForCausalLM(config, **kwargs)
        if config.vision is not None:
            where = {key: kwargs[key] for key in ("dtype", "device")}
            self.vision_tower = MoonViT(config.vision, **where)
            self.mm_projector = PatchProjector(config.vision, config.hidden_size, **where)

    def encode_image(self, pixels_YX3: Tensor) -> Tensor:
        """What stands for an image in the language model: uint8 [Y, X, 3] -> [M, H]."""
        return self.mm_projector(self.vision_tower(pixels_YX3))  # type: ignore[no-any-return]

    def stored_names(self) -> StoredNames:
        """The published layout and its variants; what is known and not read."""
        inner = self.language_model.stored_names().ignored
        ignored = {f"{_INNER}.{prefix}": reason for prefix, reason in inner.items()}
        if self.language_model.config.vision is None:
            ignored |= dict.fromkeys(VISION_PREFIXES, _NO_IMAGES)
        return StoredNames(published_name, ignored)
