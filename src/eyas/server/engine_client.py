"""What the server needs of an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from eyas.engine.messages import EngineInfo, EngineStatus
from eyas.engine.stats import EngineCounters
from eyas.types import ImageInput, SamplingParams, StepOutput


class OutputStream(Protocol):
    """Outputs of one request that the engine has accepted."""

    async def __anext__(self) -> StepOutput:
        """The next output. Raises EngineDeadError if the engine ends first."""

    def close(self) -> None:
        """Abort the request if it still runs. May be repeated."""


class EngineClient(Protocol):
    """What the server needs of an engine; AsyncEngine has it."""

    @property
    def info(self) -> EngineInfo:
        """What does not change."""

    @property
    def error(self) -> str | None:
        """Why the engine has ended, None while it lives."""

    @property
    def counters(self) -> EngineCounters:
        """What the engine has counted and timed, as far as it has told."""

    def status(self) -> EngineStatus:
        """How full the engine is."""

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        images: Sequence[ImageInput] = (),
    ) -> OutputStream:
        """Queue a request. Raises EyasError if the engine refuses it, EngineDeadError if ended."""
