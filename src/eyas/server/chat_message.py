"""A message of a conversation as clients write it: a text, or parts with images among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator, WithJsonSchema, model_validator

from eyas.server.errors import shortened

MAX_PARTS = 4096
# Fields of a message that other servers return; clients send them back empty.
_MESSAGE_EMPTY = {
    "annotations",
    "audio",
    "function_call",
    "reasoning",
    "reasoning_content",
    "refusal",
    "tool_call_id",
    "tool_calls",
}
# As clients may write what is one type here; for the OpenAPI document.
_TEXT: dict[str, Any] = {"type": "string"}
_TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_IMAGE_PART: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": _TEXT, "detail": {"enum": ["auto", "high"]}},
            "required": ["url"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "image_url"],
}
_CONTENT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            _TEXT,
            {
                "type": "array",
                "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]},
            },
        ]
    }
)


class Strict(BaseModel):
    """No value is converted and no field is unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


@dataclasses.dataclass(frozen=True)
class ImageUrl:
    """Where an image is."""

    url: str


def _read_content(content: Any) -> str | list[str | ImageUrl]:
    """Text parts alone are joined as they are; with images among them all stay apart."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of parts")
    if len(content) > MAX_PARTS:
        raise ValueError(f"{len(content)} parts, at most {MAX_PARTS} in one message")
    parts = [_read_part(index, part) for index, part in enumerate(content)]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else parts


def _read_part(index: int, part: Any) -> str | ImageUrl:
    kind = part.get("type") if isinstance(part, dict) else None
    for name in part if kind in ("text", "image_url") else ():
        if name not in ("type", kind) and part[name] is not None:
            raise ValueError(f"part {index}: {shortened(name)} is not supported beside {kind}")
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    image = part.get("image_url") if kind == "image_url" else None
    if not isinstance(image, dict) or not isinstance(image.get("url"), str):
        raise ValueError(
            f'part {index} is neither {{"type": "text", "text": "..."}} nor {{"type": "image_url", '
            '"image_url": {"url": "data:..."}}; other parts (audio, files) are not supported'
        )
    # An image is taken as it is, up to the model's own limits: "low" would be ignored.
    if image.keys() - {"url", "detail"} or image.get("detail") not in (None, "auto", "high"):
        raise ValueError(f'part {index}: beside url, an image_url may have detail "auto" or "high"')
    return ImageUrl(image["url"])


class ChatMessage(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[str | ImageUrl], PlainValidator(_read_content), _CONTENT_SCHEMA]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        if message.get("role") in ("tool", "function"):
            raise ValueError(f"messages of role {message['role']} are not supported")
        for name in _MESSAGE_EMPTY & message.keys():
            if message[name] not in (None, [], ""):
                raise ValueError(f"{name} is not supported in messages")
        return {name: value for name, value in message.items() if name not in _MESSAGE_EMPTY}

    @model_validator(mode="after")
    def _images_of_users(self) -> ChatMessage:
        if self.role != "user" and self.image_urls:
            raise ValueError(f"images are taken in messages of role user, not {self.role}")
        return self

    @property
    def image_urls(self) -> list[str]:
        """Of its images, in their order."""
        content = self.content
        if isinstance(content, str):
            return []
        return [part.url for part in content if isinstance(part, ImageUrl)]

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: "developer" is today's name of "system"."""
        role = "system" if self.role == "developer" else self.role
        content: Any = self.content
        if not isinstance(content, str):
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in content
            ]
        message = {"role": role, "content": content}
        return message if self.name is None else message | {"name": self.name}


def image_places(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    """(where it stands in the body, its url) of each image of a conversation."""
    return [
        (f"messages[{index}].content", url)
        for index, message in enumerate(messages)
        for url in message.image_urls
    ]
