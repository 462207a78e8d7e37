"""What the engine's loop and its clients tell each other: plain data, to be pickled."""

from __future__ import annotations

import dataclasses

from eyas.engine.stats import EngineCounters
from eyas.models.config import VisionConfig
from eyas.types import Finding, ImageInput, SamplingParams, StepOutput


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """What does not change. max_model_len: longest prompt and answer together, in tokens. vision:
    how images are prepared, None where none are taken."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    vision: VisionConfig | None = None

    def stop_ids(self, params: SamplingParams) -> list[int]:
        """All tokens that end a request: its own and, unless it ignores them, the model's."""
        end_ids = () if params.ignore_eos else self.eos_token_ids
        return sorted({*params.stop_token_ids, *end_ids})


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """What the engine held after its last step or command.

    num_running: requests in a slot (in prefill or decoding); num_waiting: queued ones. num_pages:
    KV pages that requests can have; num_free_pages of them are free.
    """

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int


@dataclasses.dataclass(frozen=True)
class Add:
    """A command: queue a request. Answered by a Verdict."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    images: tuple[ImageInput, ...] = ()


@dataclasses.dataclass(frozen=True)
class Abort:
    """A command: end a request, if it still runs."""

    request_id: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """A command: end after the current step."""


Command = Add | Abort | Stop


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A request is accepted (error None), refused for a mistake of its own, or failed by ours.

    param: the option at fault.
    """

    request_id: str
    error: str | None = None
    is_mistake: bool = True
    param: str | None = None


@dataclasses.dataclass(frozen=True)
class News:
    """What a step or a command brought. counters: now and then."""

    outputs: tuple[StepOutput, ...]
    status: EngineStatus
    counters: EngineCounters | None = None


@dataclasses.dataclass(frozen=True)
class Ended:
    """The last event. details: the traceback of an end that was no stop."""

    reason: str
    is_death: bool
    details: str = ""


@dataclasses.dataclass(frozen=True)
class Progressed:
    """`done` of `total` bytes of a step of the load are behind us."""

    step: str
    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class Logged:
    """A line for the log of the process that listens. level: logging's number."""

    logger: str
    level: int
    text: str


@dataclasses.dataclass(frozen=True)
class LoadFailed:
    """The load ended. findings: of the check. is_mistake: the text says all that is to say."""

    text: str
    is_mistake: bool
    findings: tuple[Finding, ...] = ()
    details: str = ""
