"""Images of prompt chunks as rows of the target's input.

An image is encoded when a chunk with a token of it is run, so that one whose pages are found in the
prefix cache never is. The latest are kept: an image may lie in several chunks, and several answers
may be asked of one prompt.

Shape suffixes: Y, X pixels, M tokens of an image, N rows given, H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.contract.target import GivenRows
from eyas.contract.vision import ImageEncoder
from eyas.speculative.round import PrefillChunk
from eyas.types import ImageInput


class ImageRows:
    """Encodes images and keeps the rows of the latest, `max_tokens` of them at most."""

    def __init__(
        self, encoder: ImageEncoder, *, max_tokens: int, device: torch.device | str
    ) -> None:
        self._encoder, self._device, self._max_tokens = encoder, device, max_tokens
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_encoded = 0

    def of(self, chunks: Sequence[PrefillChunk]) -> GivenRows | None:
        """The rows of the chunks' batch that are images; None where there are none."""
        rows: list[int] = []
        parts: list[Tensor] = []
        first_row = 0
        for chunk in chunks:
            for image in chunk.images:
                start, end = max(image.start, chunk.start), min(image.end, chunk.end)
                rows += range(first_row + start - chunk.start, first_row + end - chunk.start)
                parts.append(self._rows(image)[start - image.start : end - image.start])
            first_row += len(chunk.token_ids)
        if not parts:
            return None
        return GivenRows(torch.tensor(rows, device=self._device), torch.cat(parts))

    def _rows(self, image: ImageInput) -> Tensor:
        """[M, H]."""
        rows_MH = self._kept.pop(image.digest, None)
        if rows_MH is None:
            pixels = torch.frombuffer(bytearray(image.rgb), dtype=torch.uint8)
            pixels_YX3 = pixels.view(image.height, image.width, 3).to(self._device)
            rows_MH = self._encoder.encode_image(pixels_YX3)
            assert len(rows_MH) == image.num_tokens
            self.num_encoded += 1
        self._kept[image.digest] = rows_MH
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self._max_tokens:
            self._kept.popitem(last=False)
        return rows_MH
