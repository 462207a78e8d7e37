"""What the engine has counted and timed since it started, by batch size and draft shape."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

from eyas.config import TreeShape

Group = tuple[int, str]  # requests in the round, rounded up to a power of two; draft shape


class PartObserver(Protocol):
    """What tells how far a round is: RoundRunner on a device where calls return when done."""

    on_part: Callable[[str], None] | None


@dataclasses.dataclass
class RoundTimes:
    """Rounds of one group. seconds: by part.

    "draft" and "verify" are device time (in a replayed graph what follows the verification counts
    as "verify"); "round" is all of the launch and the wait for results; "host" is the rest of the
    turn: scheduling, pages, stop strings.
    """

    num_rounds: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, part: str, seconds: float) -> None:
        """Count more time of a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


@dataclasses.dataclass
class EngineCounters:
    """Plain numbers, to be copied to other processes.

    num_drafted[i], num_accepted[i]: tokens at draft level i + 1 that were verified, and kept.
    num_round_requests: requests of all rounds; num_round_tokens: tokens that they emitted, the
    bonus included, so that their quotient is the acceptance length. wait_seconds: in which the
    loop waited for results and did nothing else.
    """

    rounds: dict[Group, RoundTimes] = dataclasses.field(default_factory=dict)
    num_drafted: list[int] = dataclasses.field(default_factory=list)
    num_accepted: list[int] = dataclasses.field(default_factory=list)
    num_round_requests: int = 0
    num_round_tokens: int = 0
    num_preemptions: int = 0
    prefill_seconds: float = 0.0
    wait_seconds: float = 0.0


def shape_name(tree: TreeShape) -> str:
    """A shape as a label: plain, chain-3, tree-3x4-16 (depth x topk - nodes)."""
    if not tree.depth:
        return "plain"
    if tree.is_chain:
        return f"chain-{tree.depth}"
    return f"tree-{tree.depth}x{tree.topk}-{tree.num_nodes}"


def _group(num_requests: int, tree: TreeShape) -> Group:
    return 1 << (num_requests - 1).bit_length(), shape_name(tree)


class EngineStats:
    """Counts and times turns of the loop. Not thread-safe: the loop's thread writes and copies."""

    def __init__(self) -> None:
        self.counters = EngineCounters()
        self._group: Group | None = None  # of the round launched in this turn
        self._device_seconds = 0.0  # in this turn: launches and waits
        self._last_mark = 0.0

    def watch_parts(self, runner: PartObserver) -> None:
        """Have a runner tell its parts. Only for devices whose calls return when done."""
        runner.on_part = self._mark

    @contextmanager
    def turn(self) -> Generator[None, None, None]:
        """One turn of the loop: what is not device time is the host's."""
        self._group, self._device_seconds = None, 0.0
        started = time.perf_counter()
        yield
        if self._group is not None:
            whole = time.perf_counter() - started
            self._times(self._group).add("host", whole - self._device_seconds)

    @contextmanager
    def prefill(self) -> Generator[None, None, None]:
        """Around the launch of prompt chunks."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self._device_seconds += seconds
        self.counters.prefill_seconds += seconds

    @contextmanager
    def round(self, num_requests: int, tree: TreeShape) -> Generator[None, None, None]:
        """Around the launch of a round."""
        self._group = _group(num_requests, tree)
        self._times(self._group).num_rounds += 1
        with self._device_part():
            self._last_mark = time.perf_counter()
            yield

    def parts(self, num_requests: int, tree: TreeShape, seconds: Mapping[str, float]) -> None:
        """What the device measured of a round that was read."""
        for part, time_taken in seconds.items():
            self._times(_group(num_requests, tree)).add(part, time_taken)

    @contextmanager
    def wait(self) -> Generator[None, None, None]:
        """Around a wait for results."""
        before = self._device_seconds
        with self._device_part():
            yield
        self.counters.wait_seconds += self._device_seconds - before

    @contextmanager
    def _device_part(self) -> Generator[None, None, None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self._device_seconds += seconds
        if self._group is not None:
            self._times(self._group).add("round", seconds)

    def read(self, *, num_accepted: int, num_tokens: int, depth: int) -> None:
        """One request's result of a round. depth: the draft levels that were verified for it."""
        counters = self.counters
        counters.num_round_requests += 1
        counters.num_round_tokens += num_tokens
        missing = depth - len(counters.num_drafted)
        counters.num_drafted += [0] * missing
        counters.num_accepted += [0] * missing
        for level in range(depth):
            counters.num_drafted[level] += 1
            counters.num_accepted[level] += level < num_accepted

    def copy(self) -> EngineCounters:
        """The counters as they are now."""
        return copy.deepcopy(self.counters)

    def _times(self, group: Group) -> RoundTimes:
        return self.counters.rounds.setdefault(group, RoundTimes())

    def _mark(self, part: str) -> None:
        now = time.perf_counter()
        if self._group is not None:
            self._times(self._group).add(part, now - self._last_mark)
        self._last_mark = now
