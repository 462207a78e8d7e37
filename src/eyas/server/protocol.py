"""What clients may ask: the request bodies of the endpoints, parsed strictly.

A number in a string, a float for an integer or NaN are refused rather than guessed at.
"""

from __future__ import annotations

import dataclasses
import enum
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from eyas.server.chat_message import ChatMessage, Strict
from eyas.server.errors import ApiError
from eyas.server.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, served_fields
from eyas.types import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 1000
MAX_CHOICES = 128  # OpenAI's limit of n
# Far more than any model takes: what is longer is not worth the time in which others wait.
MAX_PROMPTS, MAX_MESSAGES, MAX_DETOKENIZED = 1024, 4096, 1 << 20
_MAX_SHOWN_ERRORS = 3
Prompt = str | list[int]

# As clients may write what is one type here; for the OpenAPI document.
_TEXT: dict[str, Any] = {"type": "string"}
_TOKENS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            _TEXT,
            _TOKENS,
            {"type": "array", "items": _TEXT, "minItems": 1},
            {"type": "array", "items": _TOKENS, "minItems": 1},
        ]
    }
)


class StreamUsage(enum.Enum):
    """When a stream tells its usage."""

    NONE = enum.auto()
    LAST = enum.auto()  # in a chunk of its own
    ALWAYS = enum.auto()  # so far, in every chunk, too


class StreamOptions(Strict):
    """include_usage: send the usage in a chunk of its own before the end.

    continuous_usage_stats: with it, every chunk tells the usage so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, options: Any) -> Any:
        if not isinstance(options, dict):
            return options
        return {name: value for name, value in options.items() if value is not None}


def _at_most(limit: int) -> Callable[[Any], Any]:
    """Looks at the number of items alone, before pydantic looks at each."""

    def check(items: Any) -> Any:
        if isinstance(items, list | dict) and len(items) > limit:
            raise ValueError(f"{len(items)} items, at most {limit} are taken")
        return items

    return check


_Messages = Annotated[
    list[ChatMessage],
    BeforeValidator(_at_most(MAX_MESSAGES)),
    Field(min_length=1, max_length=MAX_MESSAGES),
]
# Keys of a JSON object are strings; a longer number is no token anyhow.
_TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_ONE_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOP_SCHEMA = WithJsonSchema(
    {"anyOf": [_ONE_STOP, {"type": "array", "items": _ONE_STOP, "maxItems": MAX_STOP_STRINGS}]}
)


class _Request(Strict):
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = 0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = 1.0
    logit_bias: Annotated[
        dict[_TokenKey, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]],
        BeforeValidator(_at_most(MAX_LOGIT_BIAS)),
        Field(max_length=MAX_LOGIT_BIAS),
    ] = {}
    stop: Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS), _STOP_SCHEMA] = []
    speculation: bool = True
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0)]],
        BeforeValidator(_at_most(MAX_STOP_IDS)),
        Field(max_length=MAX_STOP_IDS),
    ] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def usage_in_stream(self) -> StreamUsage:
        """How a stream tells its usage."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return StreamUsage.NONE
        return StreamUsage.ALWAYS if options.continuous_usage_stats else StreamUsage.LAST

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None: no log-probabilities."""
        raise NotImplementedError

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises EyasError for options that contradict each other.

        `n` is not part of it: each answer is a request of its own.
        """
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=max(0, self.top_k),  # -1 is "off" too, as others write it
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
            speculation=self.speculation,
        )

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise _mistake("stream_options", "it is only allowed with stream: true")
        return self


class ChatRequest(_Request):
    """The body of /v1/chat/completions."""

    messages: _Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for; either name of the limit counts."""
        limit = self.max_completion_tokens or self.max_tokens
        return dataclasses.replace(super().sampling_params(), max_tokens=limit)

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise _mistake("top_logprobs", "it is only allowed with logprobs: true")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise _mistake(
                "max_tokens",
                "max_completion_tokens is another name of this limit and differs: give one",
            )
        return self


class CompletionRequest(_Request):
    """The body of /v1/completions. prompt: one text or token array, or a list of them."""

    prompt: Annotated[list[Prompt], _PROMPT_SCHEMA]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None: no log-probabilities."""
        return self.logprobs

    @model_validator(mode="after")
    def _no_prompt_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise _mistake(
                "echo",
                "with logprobs it asks for log-probabilities of the prompt, which are not "
                "supported: leave out one of them",
            )
        return self

    @field_validator("prompt", mode="plain")
    @classmethod
    def _as_list(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or _is_token_array(prompt):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError(_PROMPT_FORMS)
        if len(prompt) > MAX_PROMPTS:
            raise ValueError(f"{len(prompt)} prompts, at most {MAX_PROMPTS} in one request")
        if not (all(isinstance(p, str) for p in prompt) or all(map(_is_token_array, prompt))):
            raise ValueError(_PROMPT_FORMS)
        return prompt


_PROMPT_FORMS = "give a text, an array of token ids, or a list of texts or of such arrays"


def _is_token_array(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class TokenizeRequest(Strict):
    """The body of /tokenize: a text, or a conversation as the chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: _Messages | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _mistake("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[
        list[int],
        FailFast(),  # there may be as many mistakes as tokens
        BeforeValidator(_at_most(MAX_DETOKENIZED)),
        Field(max_length=MAX_DETOKENIZED),
    ]


GenerationRequest = ChatRequest | CompletionRequest
AnyRequest = TypeVar(
    "AnyRequest", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest
)
# Fields beside a request's own that may be there with these values.
NEUTRAL_FIELDS: dict[type[BaseModel], Mapping[str, tuple[Any, ...]]] = {
    ChatRequest: CHAT_NEUTRAL,
    CompletionRequest: COMPLETION_NEUTRAL,
}


def _mistake(param: str, text: str) -> PydanticCustomError:
    """What is wrong with a field that shows only beside others."""
    return PydanticCustomError("mistake", "{text}", {"param": param, "text": text})


def parse_request(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """A request from its JSON. Raises ApiError (400) with the field at fault."""
    with _collector_paused():
        return _parse_request(kind, body)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A body of a million lists makes Python look for cycles among them again and again, which
    takes far longer than to read it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _parse_request(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    try:
        # Refuses NaN, lone surrogates, bytes that are not UTF-8 and bottomless nesting.
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    fields = served_fields(
        data, known=kind.model_fields.keys(), neutral=NEUTRAL_FIELDS.get(kind, {})
    )
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _api_error(error) from error


def _api_error(error: ValidationError) -> ApiError:
    details = error.errors(include_url=False, include_input=False)
    texts, first = [], None
    for detail in details[:_MAX_SHOWN_ERRORS]:
        place = _place(detail["loc"]) or detail.get("ctx", {}).get("param")
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
