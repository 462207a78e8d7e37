"""How far the server is: checking, loading, ready, stopping or failed."""

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
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


class ServerState:
    """The phase, with its reason or progress, and the service once there is one.

    Written by the launcher (`report_progress` from the loader's thread), read by the routes.
    """

    def __init__(self) -> None:
        self.phase = Phase.CHECKING
        self.detail: str | None = None
        self._service: Service | None = None

    def report_progress(self, step: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a step are behind us; steps named "loading" are the load."""
        if step.startswith("loading"):
            self.phase = Phase.LOADING
        percent = 100 * done // total if total else 100
        self.detail = f"{step}: {percent} %"

    def become_ready(self, service: Service) -> None:
        """The service answers from now on."""
        self.phase, self.detail, self._service = Phase.READY, None, service

    def stop(self) -> None:
        """No new requests; what runs may end."""
        self.phase, self.detail = Phase.STOPPING, None

    def fail(self, reason: str) -> None:
        """The server will end, for this reason."""
        self.phase, self.detail = Phase.FAILED, reason

    def service(self) -> Service:
        """The service. Raises ApiError (503) with the phase unless it answers requests."""
        phase, detail = self._now()
        if phase is not Phase.READY or self._service is None:
            because = f": {detail}" if detail else ""
            raise ApiError(503, f"the server is not ready ({phase}{because})", code=phase)
        return self._service

    def health(self) -> dict[str, Any]:
        """The phase and, when ready, how full the engine is; for /health."""
        phase, detail = self._now()
        health: dict[str, Any] = {"status": phase}
        if detail:
            health["detail"] = detail
        if phase is Phase.READY and self._service is not None:
            health |= dataclasses.asdict(self._service.engine.status())
        return health

    def _now(self) -> tuple[Phase, str | None]:
        """The engine may have died before the launcher has seen it."""
        if self.phase is Phase.READY and self._service is not None:
            error = self._service.engine.error
            if error is not None:
                return Phase.FAILED, error
        return self.phase, self.detail
