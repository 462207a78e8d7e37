"""What a target's images need beside the weights of its vision tower."""

from __future__ import annotations

from eyas.models.config import ModelConfig
from eyas.models.images import largest_tokens

_FP32_BYTES = 4
# Numbers of the tower's width, a patch, beside the stream: in attention its norm, queries, keys
# and values, rotated queries and keys taken apart, and in fp32 what rotates them; before an MLP the
# sum and its norm.
_ATTENTION_WIDTHS, _ROTATION_WIDTHS, _SUM_WIDTHS = 6, 3, 2


def kept_image_bytes(target: ModelConfig, dtype_bytes: int) -> int:
    """Rows of the latest images, kept between prompt chunks."""
    if target.vision is None:
        return 0
    return largest_tokens(target.vision) * target.hidden_size * dtype_bytes


def encoding_bytes(target: ModelConfig, dtype_bytes: int) -> int:
    """While the largest image is encoded."""
    vision = target.vision
    if vision is None:
        return 0
    num_tokens = largest_tokens(vision)
    num_patches = num_tokens * vision.merge_size**2
    width, converts = vision.hidden_size, dtype_bytes < _FP32_BYTES
    colours = 3 * vision.patch_size**2
    # Colours in their order and in that of the patches, then embedded and with positions.
    pixels = colours * (2 * _FP32_BYTES + converts * dtype_bytes)
    pixels += width * (2 * dtype_bytes + _FP32_BYTES)
    rotation = (_ROTATION_WIDTHS + converts) * _FP32_BYTES
    attention = width * (_ATTENTION_WIDTHS * dtype_bytes + rotation)
    mlp = (_SUM_WIDTHS * width + 2 * vision.intermediate_size) * dtype_bytes
    tables = 2 * width // vision.num_heads * _FP32_BYTES
    block = width * dtype_bytes + tables + max(attention, mlp)
    rows = num_tokens * target.hidden_size * dtype_bytes
    return num_patches * max(pixels, block) + rows
