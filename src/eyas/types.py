"""Plain data that every layer shares: errors, findings, sampling parameters and outputs.

Nothing here imports torch, so that the command line and `eyas check` start quickly.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class EyasError(Exception):
    """A mistake that the user can mend; its text says what to change."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    max_tokens: new tokens at most; None means up to the model length.
    temperature: 0 is greedy; above 0 the logits are divided by it.
    seed: any integer; the sampled text is a function of seed and prompt alone (design D9). None
        draws one at random.
    stop_token_ids: end the request, as do the model's own end tokens; the stop token itself is
        counted as generated and is not part of the text.
    ignore_eos: do not stop at the model's own end tokens (benchmarks).

    Raises EyasError on values out of range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise EyasError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0.0 <= self.temperature <= 100.0:  # also refuses NaN
            raise EyasError(f"temperature must be between 0 and 100, not {self.temperature}")
        if any(token < 0 for token in self.stop_token_ids):
            raise EyasError("stop_token_ids must not be negative")


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What one engine step found out about one request.

    new_token_ids: tokens emitted since the last output, in order. finish_reason: set on the last
    output. error: text when finish_reason is ERROR. num_rounds, num_round_tokens: so far, as in
    RequestOutput.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_rounds: int = 0
    num_round_tokens: int = 0


@dataclasses.dataclass
class RequestOutput:
    """A finished request.

    token_ids: all generated tokens, a final stop token included. num_rounds: target forwards
    after the prompt; num_round_tokens: tokens which they emitted (the prefill's own token is not
    among them), so that acceptance_length = num_round_tokens / num_rounds, the bonus included.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_rounds: int = 0
    num_round_tokens: int = 0
    error: str | None = None

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target forward; 1.0 for plain decoding, NaN before any round."""
        return self.num_round_tokens / self.num_rounds if self.num_rounds else float("nan")
