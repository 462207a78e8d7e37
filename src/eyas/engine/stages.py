"""How long a start took, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Mapping


class StageClock:
    """Seconds by stage, in order; a stage begins where the last one ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """A stage has ended now."""
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now

    def replace(self, stages: Mapping[str, float]) -> None:
        """Stages that something else timed since the last one ended."""
        self.seconds |= stages
        self._last = time.perf_counter()


def describe(seconds: Mapping[str, float]) -> str:
    """One line: "check 1.2 s, load 3.4 s, 4.6 s in all"."""
    parts = [f"{stage} {time:.1f} s" for stage, time in seconds.items()]
    return f"{', '.join(parts)}; {sum(seconds.values()):.1f} s in all"
