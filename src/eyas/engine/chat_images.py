"""Conversations with images: where the images come from, and the prompt that they become part of.

Nothing is fetched from the network: an image is in the request, or in a folder that was opened to
clients on purpose.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from eyas.engine.image_places import NO_IMAGES, place_images
from eyas.engine.tokenizer import Tokenizer
from eyas.models.config import VisionConfig
from eyas.models.images import ImageError, ImageLimits, fit_image, read_image, require_pillow
from eyas.types import EyasError, ImageInput

_DATA_FORM = "data:image/png;base64,…"


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in tokens, its images in their places."""

    token_ids: list[int]
    images: tuple[ImageInput, ...] = ()


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[ImageInput],
    *,
    vision: VisionConfig | None,
    settings: Mapping[str, Any] | None = None,
) -> EncodedPrompt:
    """A conversation under the model's chat template. In a message with images, the content is a
    list of {"type": "text", "text": …} and {"type": "image"}; images: in their order.

    Raises EyasError if the template refuses the messages or does not place each image.
    """
    if vision is None and images:
        raise EyasError(NO_IMAGES)
    token_ids = tokenizer.render_chat(messages, settings)
    if vision is None:
        return EncodedPrompt(token_ids)
    return EncodedPrompt(*place_images(token_ids, images, vision.placeholder_id))


def image_bytes(url: str, limits: ImageLimits, *, local_folder: Path | None) -> bytes:
    """The file behind a data: URL, or a file: URL within the folder (None: no such are taken).

    Raises ImageError, in whose text no more of the URL is shown than its scheme.
    """
    scheme = url[:16].partition(":")[0].lower() if ":" in url[:16] else ""
    if scheme == "data":
        return _from_data(url, limits)
    if scheme == "file":
        return _from_file(url, limits, local_folder)
    if scheme in ("http", "https"):
        raise ImageError(f"images are not fetched over {scheme}: send a data: URL ({_DATA_FORM})")
    raise ImageError(f"an image's url must be a data: URL ({_DATA_FORM})")


def _from_data(url: str, limits: ImageLimits) -> bytes:
    header, comma, text = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ImageError(f"the data: URL is not in base64: write {_DATA_FORM}")
    if len(text) > (limits.max_image_bytes + 2) // 3 * 4:
        size = len(text) * 3 // 4
        raise ImageError(f"the image has {size} bytes, at most {limits.max_image_bytes} are taken")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data: URL is not valid base64: {error}") from None


def _from_file(url: str, limits: ImageLimits, folder: Path | None) -> bytes:
    if folder is None:
        raise ImageError(
            "local files are not read: send a data: URL, or start the server with "
            "--allow-local-images FOLDER"
        )
    parts = urlsplit(url)
    # One text for all that is wrong: a client shall not learn what else the machine has.
    unreadable = ImageError("the file: URL names no readable file in the folder for images")
    if parts.netloc not in ("", "localhost"):
        raise unreadable
    try:
        path = Path(unquote(parts.path)).resolve(strict=True)
        if not path.is_relative_to(folder.resolve(strict=True)) or not path.is_file():
            raise unreadable
        with path.open("rb") as file:
            return file.read(limits.max_image_bytes + 1)  # one more tells that there is more
    except (OSError, ValueError, RuntimeError):
        raise unreadable from None


def split_messages(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """(messages as templates know them, the sources of their images in order), for `load_source`.

    A part of a content may be {"type": "image", "image": SOURCE}, or as in the HTTP API
    {"type": "image_url", "image_url": {"url": "data:…"}}. Raises EyasError for what is no message.
    """
    shown: list[Mapping[str, Any]] = []
    sources: list[Any] = []
    if not isinstance(messages, list | tuple):
        raise EyasError("messages must be a list of {role, content}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise EyasError(f"a message must be {{role, content}}, not {message!r:.100}")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise EyasError(f"a content must be a text or a list of parts, not {content!r:.100}")
        if isinstance(content, list):
            message = {**message, "content": [_split_part(part, sources) for part in content]}
        shown.append(message)
    return shown, sources


def _split_part(part: Any, sources: list[Any]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image" and "image" in part:
        sources.append(part["image"])
    elif kind == "image_url" and isinstance(part.get("image_url"), Mapping):
        sources.append(_Url(str(part["image_url"].get("url"))))
    elif kind == "text" and isinstance(part.get("text"), str):
        return part
    else:
        raise EyasError(
            'a part of a content must be {"type": "text", "text": …}, '
            '{"type": "image", "image": FILE, BYTES OR PILLOW IMAGE}, or '
            '{"type": "image_url", "image_url": {"url": "data:…"}}'
        )
    return {"type": "image"}


class _Url(str):
    """Told from a path, which is a str too."""


def load_source(source: Any, vision: VisionConfig) -> ImageInput:
    """An image of this process's own: a path, a file's bytes, a Pillow image or a URL.

    Raises EyasError if it cannot be used.
    """
    limits = ImageLimits()
    if isinstance(source, _Url):
        return read_image(image_bytes(source, limits, local_folder=Path("/")), vision, limits)
    if isinstance(source, str | os.PathLike):
        try:
            source = Path(source).read_bytes()
        except (OSError, ValueError) as error:
            raise ImageError(f"{os.fspath(source)} cannot be read: {error}") from None
    if isinstance(source, bytes | bytearray):
        return read_image(bytes(source), vision, limits)
    require_pillow()
    from PIL import Image

    if isinstance(source, Image.Image):
        try:
            return fit_image(source, vision)
        except (OSError, ValueError) as error:  # it is read only now, or was closed before
            raise ImageError(f"a Pillow image cannot be used: {error}") from None
    raise ImageError(f"an image must be a path, bytes or a Pillow image, not {type(source)}")
