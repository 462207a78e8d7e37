"""Plain data that every layer shares: errors, findings, sampling parameters and outputs.

Nothing here imports torch, so that the command line and `eyas check` start quickly.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class EyasError(Exception):
    """A mistake that the user can mend; its text says what to change.

    param: the option or field at fault, where it is one.
    """

    def __init__(self, text: str, *, param: str | None = None) -> None:
        super().__init__(text)
        self.param = param


class TooLongError(EyasError):
    """A prompt, or a prompt and its answer, that exceed the model length."""


class Severity(enum.StrEnum):
    """How bad a finding is: errors stop `serve` and give `check` exit code 2."""

    ERROR = "error"
    WARNING = "warning"
    SKIPPED = "skipped"  # could not be checked (no weight files yet): never called "passed"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of the contract check.

    code: stable, kebab-case name of the rule, for scripts. subject: "target", "draft", "pair",
    "device" or "settings". message: what is wrong, with the numbers. hint: what to change.
    """

    severity: Severity
    code: str
    subject: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" -> {self.hint}" if self.hint else ""
        return f"{self.severity.value}: [{self.subject}] {self.code}: {self.message}{hint}"


class CheckError(EyasError):
    """Raised when the contract check found errors; carries all findings at once."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        super().__init__(
            f"the check found {len(errors)} error(s):\n" + "\n".join(f"  {f}" for f in errors)
        )


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token, EOS included
    LENGTH = "length"  # max_tokens or the model length
    ABORT = "abort"
    ERROR = "error"


def type_mistake(kind: Any, value: object) -> str | None:
    """What a value of an annotated type must be, None if it is one.

    Sequences stand for tuples, and numpy's numbers for Python's; a bool is no number.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        wanted = [type_mistake(one, value) for one in inner]
        return " or ".join(text for text in wanted if text) if all(wanted) else None
    if origin is typing.Literal:
        is_one = any(value is one or (type(value) is type(one) and value == one) for one in inner)
        return None if is_one else f"one of {', '.join(map(repr, inner))}"
    if origin is tuple:
        hint = f": write ({value!r},)" if isinstance(value, str | bytes) else ""
        if isinstance(value, Sequence) and not hint and _all_are(inner[0], value):
            return None
        return f"a tuple, each item {type_mistake(inner[0], _NOTHING)}{hint}"
    if origin is Mapping:
        key, item = inner
        if isinstance(value, Mapping) and _all_are(key, value) and _all_are(item, value.values()):
            return None
        named = [type_mistake(one, _NOTHING) for one in inner]
        return f"a mapping from {named[0]} to {named[1]}"
    classes, text = _PLAIN_KINDS[kind]
    is_one = isinstance(value, classes) and (kind is bool or not isinstance(value, bool))
    return None if is_one else text


def _all_are(kind: Any, values: Iterable[object]) -> bool:
    return all(type_mistake(kind, value) is None for value in values)


_NOTHING = object()  # of no type that is asked for
_PLAIN_KINDS: dict[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "a string"),
    types.NoneType: (types.NoneType, "None"),
}

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_IDS = 32  # the model's own end tokens included


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every option holds on every row, drafted or not.

    max_tokens: new tokens at most; None means up to the model length. min_tokens: before that many
        tokens no stop token is chosen and no stop string ends the request.
    temperature: 0 is greedy; above 0 the logits are divided by it.
    top_k (0: off), top_p (1: off), min_p (0: off): restrict the choice, in this order.
    presence_penalty, frequency_penalty: OpenAI's, by the generated tokens; repetition_penalty:
        multiplicative, by prompt and generated tokens (1: off).
    logit_bias: added to the logits of these tokens, each -100 to 100.
    seed: any integer; the sampled text is a function of seed and prompt alone (design D9). None
        draws one at random.
    stop_token_ids: end the request, as do the model's own end tokens; the stop token itself is
        counted as generated and is not part of the text.
    stop: strings that end the request; neither they nor what follows is part of the text.
    ignore_eos: do not stop at the model's own end tokens (benchmarks).
    logprobs: how many most probable tokens to report with each token (0: its own log-probability
        alone; None: nothing). They are of the model's own distribution, before any option above.
    n: answers to one prompt; answer i has seed + i.
    speculation: False verifies no drafted token of this request. The output is the same.

    Raises EyasError on values out of range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    speculation: bool = True

    def __post_init__(self) -> None:
        for name, kind in _sampling_types().items():
            if text := type_mistake(kind, getattr(self, name)):
                raise EyasError(f"{name} must be {text}, not {getattr(self, name)!r}", param=name)
        limits: dict[str, tuple[float, float]] = {
            "min_tokens": (0, math.inf),
            "temperature": (0, 100),
            "top_k": (0, 2**31),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "presence_penalty": (-2, 2),
            "frequency_penalty": (-2, 2),
            "repetition_penalty": (0.01, 100),
            "logprobs": (0, MAX_LOGPROBS),
            "n": (1, 128),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # also refuses NaN
                text = f"{name} must be between {low} and {high}, not {value}"
                raise EyasError(text, param=name)
        if self.top_p == 0:
            text = "top_p must be above 0; use temperature 0 for greedy answers"
            raise EyasError(text, param="top_p")
        if self.max_tokens is not None and self.max_tokens < max(1, self.min_tokens):
            raise EyasError(
                f"max_tokens must be at least 1 and min_tokens ({self.min_tokens}), "
                f"not {self.max_tokens}",
                param="max_tokens",
            )
        self._check_lists()

    def _check_lists(self) -> None:
        if any(token < 0 for token in self.stop_token_ids):
            raise EyasError("stop_token_ids must not be negative", param="stop_token_ids")
        if any(not text for text in self.stop):
            raise EyasError("stop strings must not be empty", param="stop")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            text = f"logit_bias may have {MAX_LOGIT_BIAS} entries at most"
            raise EyasError(text, param="logit_bias")
        if any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise EyasError("logit_bias values must be between -100 and 100", param="logit_bias")


@functools.cache
def _sampling_types() -> dict[str, Any]:
    return typing.get_type_hints(SamplingParams)


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """An image in a prompt, in the size in which the model takes it.

    height, width: in pixels. rgb: three bytes a pixel, row by row from the top. num_tokens: the
    prompt's tokens that it fills, from position `start` on. digest: tells images apart by content.
    """

    height: int
    width: int
    rgb: bytes = dataclasses.field(repr=False)
    num_tokens: int
    digest: bytes
    start: int = 0

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token, and the most probable ones (best first)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What one engine step found out about one request.

    new_token_ids: tokens emitted since the last output, in order. finish_reason: set on the last
    output. error: text when finish_reason is ERROR. num_rounds, num_round_tokens,
    num_cached_tokens: so far, as in RequestOutput. accepted_counts: on the last output, as in
    RequestOutput. logprobs: one a token, where asked for.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_rounds: int = 0
    num_round_tokens: int = 0
    num_cached_tokens: int = 0
    accepted_counts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclasses.dataclass
class RequestOutput:
    """A finished request. index: which of a prompt's n answers it is.

    token_ids: all generated tokens, a final stop token included. num_rounds: target forwards
    after the prompt; num_round_tokens: tokens which they emitted (the prefill's own token is not
    among them), so that acceptance_length = num_round_tokens / num_rounds, the bonus included.
    accepted_counts: entry a counts the rounds which emitted a drafted tokens; it ends with the
    largest a seen. num_cached_tokens: prompt tokens taken from the prefix cache. logprobs: one a
    token, where asked for. error: text when finish_reason is ERROR.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_rounds: int = 0
    num_round_tokens: int = 0
    num_cached_tokens: int = 0
    accepted_counts: tuple[int, ...] = ()
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    error: str | None = None
    index: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target forward; 1.0 for plain decoding, NaN before any round."""
        return self.num_round_tokens / self.num_rounds if self.num_rounds else float("nan")
