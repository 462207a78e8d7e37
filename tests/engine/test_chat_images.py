"""Conversations and images of this process's own: what is none is refused in words."""

from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from eyas.engine.chat_images import load_source, split_messages
from eyas.models.config import VisionConfig
from eyas.models.images import fit_image
from eyas.types import EyasError

TEXT = {"type": "text", "text": "a"}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("hello", "messages must be a list"),
        (None, "messages must be a list"),
        (["hello"], "a message must be {role, content}, not 'hello'"),
        ([{"content": "hello"}], "a message must be {role, content}"),
        (user(5), "a text or a list of parts, not 5"),
        (user(["a"]), "a part of a content must be"),
        (user([TEXT, None]), "a part of a content must be"),
        (user([{"type": "text", "text": None}]), "a part of a content must be"),
        (user([{"type": "text"}]), "a part of a content must be"),
        (user([{"type": "image_url", "image_url": "data:"}]), "a part of a content must be"),
    ],
)
def test_what_is_no_message(messages: Any, text: str) -> None:
    with pytest.raises(EyasError, match=text):
        split_messages(messages)


def test_images_are_taken_out_in_their_order() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:x"}}
    messages = [*user([{"type": "image", "image": "a.png"}, TEXT, url]), *user("b")]
    shown, sources = split_messages(messages)
    assert shown == [*user([{"type": "image"}, TEXT, {"type": "image"}]), *user("b")]
    assert sources == ["a.png", "data:x"]


def closed(path: Path) -> PIL.Image.Image:
    image = PIL.Image.open(path)
    image.close()
    return image


def test_sources(tmp_path: Path) -> None:
    vision, path = VisionConfig(), tmp_path / "a.png"
    image = PIL.Image.new("RGB", (30, 20), (1, 2, 3))
    image.save(path)
    for source in (image, path, str(path), path.read_bytes()):
        assert load_source(source, vision) == fit_image(image, vision)
    wrong: list[Any] = [None, 5, tmp_path, tmp_path / "none.png", "a\0b", b"a", closed(path)]
    for source in wrong:
        with pytest.raises(EyasError, match="image|cannot be read"):
            load_source(source, vision)
