"""What a target's images need beside the weights of its vision tower."""

from __future__ import annotations

from eyas.models.config import ModelConfig
from eyas.models.images import largest_tokens

_FP32_BYTES = 4
_PIXEL_COPIES = 4  # as bytes, scaled, shifted and in the order of the patches
# Of a block, numbers a patch by tower width: the stream, its norm, queries, keys and values, and
# the latter apart; beside them queries and keys in fp32, twice while they are rotated.
_WIDTHS, _FP32_WIDTHS = 8, 6


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
    pixels = 3 * num_patches * vision.patch_size**2 * _FP32_BYTES * _PIXEL_COPIES
    width = vision.hidden_size
    attention = width * (_WIDTHS * dtype_bytes + _FP32_WIDTHS * _FP32_BYTES)
    mlp = (2 * width + 2 * vision.intermediate_size) * dtype_bytes
    projector = (3 * width * vision.merge_size**2 + target.hidden_size) * dtype_bytes
    rows = num_tokens * target.hidden_size * dtype_bytes
    return max(pixels, num_patches * max(attention, mlp, projector)) + rows
