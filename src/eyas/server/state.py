"""How far the server is: checking, loading, warming up, ready, stopping or failed."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from eyas.server.errors import ApiError
from eyas.server.service import Service


class Phase(enum.StrEnum):
    """Where a server is in its life. Only READY answers requests."""

    CHECKING = "checking"
    LOADING = "loading"
    WARMING = "warming"  # the first answer, to itself
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Progress:
    """`done` of `total` bytes, or of a few things, of a step are behind us."""

    step: str
    done: int
    total: int

    def __str__(self) -> str:
        percent = 100 * self.done // self.total if self.total else 100
        return f"{self.step}: {percent} %"


class ServerState:
    """The phase, with its reason or progress, and the service once there is one.

    Written by the launcher, read by the routes, both in the event loop's thread.
    """

    def __init__(self) -> None:
        self.phase = Phase.CHECKING
        self._progress: Progress | None = None
        self._reason: str | None = None
        self._service: Service | None = None

    def report_progress(self, step: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a step are behind us; steps named "loading" are the load."""
        if step.startswith("loading"):
            self.phase = Phase.LOADING
        self._progress = Progress(step, done, total)

    def warm_up(self) -> None:
        """The engine is there; the first completion has to show that it works."""
        self.phase, self._progress = Phase.WARMING, None

    def become_ready(self, service: Service) -> None:
        """The service answers from now on."""
        self.phase, self._service = Phase.READY, service
        self._progress = self._reason = None

    def stop(self) -> None:
        """No new requests; what runs may end."""
        self.phase, self._progress = Phase.STOPPING, None

    def fail(self, reason: str) -> None:
        """The server will end, for this reason."""
        self.phase, self._progress, self._reason = Phase.FAILED, None, reason

    @property
    def running_service(self) -> Service | None:
        """The service as long as there is one, for those who look at it."""
        return self._service

    def service(self) -> Service:
        """The service. Raises ApiError (503) with the phase unless it answers requests."""
        phase, detail = self._now()
        if phase is not Phase.READY or self._service is None:
            because = f": {detail}" if detail else ""
            raise ApiError(503, f"the server is not ready ({phase}{because})", code=phase)
        return self._service

    def ready(self) -> dict[str, Any]:
        """The phase with its progress or reason; for /ready."""
        phase, detail = self._now()
        told: dict[str, Any] = {"status": phase}
        if detail:
            told["detail"] = detail
        if self._progress is not None:
            told["progress"] = dataclasses.asdict(self._progress)
        return told

    def health(self) -> dict[str, Any]:
        """The same and, when ready, how full the engine is; for /health."""
        health = self.ready()
        if health["status"] is Phase.READY and self._service is not None:
            health |= dataclasses.asdict(self._service.engine.status())
        return health

    def _now(self) -> tuple[Phase, str | None]:
        """The engine may have died before the launcher has seen it."""
        if self.phase is Phase.READY and self._service is not None:
            error = self._service.engine.error
            if error is not None:
                return Phase.FAILED, error
        detail = self._reason if self._progress is None else str(self._progress)
        return self.phase, detail
