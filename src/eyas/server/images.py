"""The images of a request: read, decoded and shrunk away from the event loop, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eyas.engine.chat_images import image_bytes
from eyas.engine.image_places import NO_IMAGES
from eyas.models.config import VisionConfig
from eyas.models.images import ImageLimits, read_image
from eyas.server.errors import ApiError
from eyas.types import EyasError, ImageInput

_NUM_THREADS = 2  # which bounds the memory of images that are being decoded
_BODY_BYTES = 16 << 20


def body_limit(limits: ImageLimits) -> int:
    """Bytes of a body that holds an image of the largest kind, which base64 makes a third longer,
    and some text."""
    return max(_BODY_BYTES, limits.max_image_bytes * 4 // 3 + (1 << 20))


class ImageReader:
    """Reads images within limits. local_folder: clients may name its files by file: URLs."""

    def __init__(self, limits: ImageLimits | None = None, local_folder: Path | None = None) -> None:
        self._limits, self._local_folder = limits or ImageLimits(), local_folder
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="eyas-images")

    async def read_all(
        self, images: Sequence[tuple[str, str]], vision: VisionConfig | None
    ) -> list[ImageInput]:
        """Images given as (where it stands in the body, url), one after the other.

        Raises ApiError (400) that names the place and the reason of the first that cannot be used.
        """
        if not images:
            return []
        if vision is None:
            raise _refused(NO_IMAGES, images[0][0])
        if len(images) > self._limits.max_images:
            text = f"the request has {len(images)} images, at most {self._limits.max_images}"
            raise _refused(f"{text} are taken", images[self._limits.max_images][0])
        loop, read = asyncio.get_running_loop(), []
        for number, (place, url) in enumerate(images):
            try:
                read.append(await loop.run_in_executor(self._executor, self._read, url, vision))
            except EyasError as error:
                raise _refused(f"image {number + 1}: {error}", place) from error
        return read

    def close(self) -> None:
        """Let the threads go."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _read(self, url: str, vision: VisionConfig) -> ImageInput:
        data = image_bytes(url, self._limits, local_folder=self._local_folder)
        return read_image(data, vision, self._limits)


def _refused(text: str, place: str) -> ApiError:
    return ApiError(400, text, param=place, code="invalid_image")
