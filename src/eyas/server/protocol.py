"""What clients may ask: the request bodies of the two endpoints, parsed strictly.

A number in a string, a float for an integer or NaN are refused rather than guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eyas.server.errors import ApiError
from eyas.server.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, served_fields

MAX_CHOICES = 128  # OpenAI's limit of n
_MAX_SHOWN_ERRORS = 3
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

Prompt = str | list[int]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    """include_usage: send the usage in a chunk of its own before the end."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatMessage(_Strict):
    """One message of a conversation; content parts of type text are joined as they are."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
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

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = []
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f'part {index} is not {{"type": "text", "text": "..."}}; other parts '
                    "(images, audio, files) are not supported"
                )
            texts.append(part["text"])
        return "".join(texts)

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it: "developer" is today's name of "system"."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else message | {"name": self.name}


class _Request(_Strict):
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream tells its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self


class ChatRequest(_Request):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError(
                "max_tokens and max_completion_tokens are two names of one limit and differ: "
                "give one"
            )
        return self


class CompletionRequest(_Request):
    """The body of /v1/completions. prompt: one text or token array, or a list of them."""

    prompt: list[Prompt]

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or _is_token_array(prompt):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError(_PROMPT_FORMS)
        if not (all(isinstance(p, str) for p in prompt) or all(map(_is_token_array, prompt))):
            raise ValueError(_PROMPT_FORMS)
        return prompt


_PROMPT_FORMS = "give a text, an array of token ids, or a list of texts or of such arrays"


def _is_token_array(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)
_NEUTRAL: dict[type[_Request], Mapping[str, tuple[Any, ...]]] = {
    ChatRequest: CHAT_NEUTRAL,
    CompletionRequest: COMPLETION_NEUTRAL,
}


def parse_request(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """A request from its JSON. Raises ApiError (400) with the field at fault."""
    try:
        # Refuses NaN, lone surrogates, bytes that are not UTF-8 and bottomless nesting.
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    fields = served_fields(data, known=kind.model_fields.keys(), neutral=_NEUTRAL[kind])
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _api_error(error) from error


def _api_error(error: ValidationError) -> ApiError:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    texts, first = [], None
    for detail in details[:_MAX_SHOWN_ERRORS]:
        place = _place(detail["loc"])
        first = first or place
        message = detail["msg"].removeprefix("Value error, ")
        texts.append(f"{place}: {message}" if place else message)
    if len(details) > _MAX_SHOWN_ERRORS:
        texts.append(f"and {len(details) - _MAX_SHOWN_ERRORS} more")
    return ApiError(400, "; ".join(texts), param=first, code="invalid_value")


def _place(location: tuple[int | str, ...]) -> str | None:
    """("messages", 0, "role") as messages[0].role."""
    place = ""
    for step in location:
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else step
    return place or None
