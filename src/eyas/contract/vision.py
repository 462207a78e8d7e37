"""What a target that takes images offers beside `Target`.

Shape suffixes: Y, X pixels, M tokens that an image fills, H hidden.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class ImageEncoder(Protocol):
    """A model that can turn an image into rows of its input."""

    def encode_image(self, pixels_YX3: Tensor) -> Tensor:
        """uint8 [Y, X, 3], whose sides are multiples of what becomes a token -> [M, H], row by
        row from the top."""
