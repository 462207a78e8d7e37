"""Image files as the model takes them: decoded, shrunk to its limits, padded to whole tokens.

Resizing and padding are those of Kimi-K2.5's published preprocessing (`media_utils.py` of its
checkpoint, 2026): bicubic, never up, black at the right and at the bottom.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
from typing import TYPE_CHECKING, Any

from eyas.config import ConfigError
from eyas.models.config import VisionConfig
from eyas.types import EyasError, ImageInput

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_UNREADABLE = f"this is no image that can be read ({', '.join(_FORMATS)})"
_MAY_MOVE = {"PNG", "WEBP", "GIF"}  # a phone's JPEG may hold a second picture, which is no frame


class ImageError(EyasError):
    """An image that cannot be used; says why."""


def _limit(default: int, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What is taken of a client; the pixels bound the memory that decoding takes.

    Raises ConfigError for a limit below 1.
    """

    max_images: int = _limit(16, "Images a request.")
    max_image_bytes: int = _limit(
        10 << 20, "Of an image's file; in a request it is a third longer."
    )
    max_image_pixels: int = _limit(50_000_000, "Of an image; decoding takes four bytes for each.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"--{field.name.replace('_', '-')} must be at least 1")


def require_pillow() -> None:
    """Raises EyasError with what to install where Pillow is not there."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise EyasError("images need Pillow: pip install 'eyas[vision]'") from None


def fitted_size(
    height: int, width: int, vision: VisionConfig
) -> tuple[tuple[int, int], tuple[int, int]]:
    """((height, width) after shrinking, (height, width) after padding), in pixels."""
    patch, most = vision.patch_size, vision.max_side_patches * vision.patch_size
    num_patches = max(1, height // patch) * max(1, width // patch)
    by_patches = math.sqrt(vision.max_patches / num_patches)
    scale = min(1.0, by_patches, most / width, most / height)
    shrunk = [min(max(1, int(side * scale)), most) for side in (height, width)]
    padded = [-(-side // vision.token_size) * vision.token_size for side in shrunk]
    return (shrunk[0], shrunk[1]), (padded[0], padded[1])


def largest_tokens(vision: VisionConfig) -> int:
    """No image fills more tokens, whatever its size.

    With a patches on the shorter side and b on the longer, both limits together leave
    a >= max_patches / max_side. Shrinking rounds patches down, by less than one a side, before it
    compares them with the limit, and padding adds less than a token a row and column.
    """
    side, merge = vision.max_side_patches, vision.merge_size
    most = vision.max_patches + side + vision.max_patches // side + 2
    return most // merge**2 + 2 * -(-side // merge) + 1


def read_image(data: bytes, vision: VisionConfig, limits: ImageLimits) -> ImageInput:
    """An image file for the model; its place in the prompt is still to be set.

    Raises ImageError for a file that is too large, has too many pixels, is of another format,
    moves, or is broken. Nothing is decoded before its size is known to be within the limits.
    """
    if len(data) > limits.max_image_bytes:
        raise ImageError(
            f"the image has {len(data)} bytes, at most {limits.max_image_bytes} are taken"
        )
    return fit_image(_decode(data, limits), vision)


def _decode(data: bytes, limits: ImageLimits) -> Image:
    require_pillow()
    from PIL import Image, ImageOps, UnidentifiedImageError

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)  # reads the header alone
        num_pixels = image.width * image.height
        if num_pixels > limits.max_image_pixels:
            raise ImageError(_too_many(f"{image.width} × {image.height}", limits))
        if image.format in _MAY_MOVE and getattr(image, "is_animated", False):
            raise ImageError("the image is an animation: send one frame of it")
        image.load()
        upright = ImageOps.exif_transpose(image)
        assert upright is not None  # it is for calls with in_place alone
        return upright
    except ImageError:
        raise
    except bombs:
        raise ImageError(_too_many("far too many", limits)) from None
    except UnidentifiedImageError:  # whose text is the address of an object
        raise ImageError(f"{_UNREADABLE}: it begins like none of these") from None
    except Exception as error:  # decoders raise anything on broken files
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ImageError(f"{_UNREADABLE}: {reason[0][:200]}") from None


def _too_many(found: str, limits: ImageLimits) -> str:
    return f"the image has {found} pixels, at most {limits.max_image_pixels} are taken: shrink it"


def _as_rgb(image: Image) -> Image:
    """Three bytes a pixel; transparency is dropped, as the published preprocessing does."""
    if image.mode.startswith("I"):  # 16 bits a grey; a plain conversion would cut them off
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


def fit_image(image: Image, vision: VisionConfig) -> ImageInput:
    """A decoded image, shrunk and padded; its place in the prompt is still to be set.

    Raises ImageError for one without pixels.
    """
    from PIL import Image as ImageModule

    if not image.width * image.height:
        raise ImageError(f"the image has {image.width} × {image.height} pixels")
    image = _as_rgb(image)
    (height, width), padded = fitted_size(image.height, image.width, vision)
    resized = image.resize((width, height), ImageModule.Resampling.BICUBIC)
    canvas = ImageModule.new("RGB", (padded[1], padded[0]))
    canvas.paste(resized, (0, 0))
    rgb = canvas.tobytes()
    digest = hashlib.blake2b(repr(padded).encode() + rgb, digest_size=16).digest()
    num_tokens = padded[0] * padded[1] // vision.token_size**2
    return ImageInput(*padded, rgb=rgb, num_tokens=num_tokens, digest=digest)
