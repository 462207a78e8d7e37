"""Reads a profiler's trace of rounds: where the device's time went, and whether the host waited.

The device runs a round after the host has launched it, so what runs on the device belongs to the
round in which it was launched: both sides carry the same correlation number.
"""

from __future__ import annotations

import bisect
import dataclasses
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROUND = "eyas round"  # the annotation around a round's launch
MARKER = "spin_kernel"  # at the end of each part of a round
_PARTS = ("draft", "verify", "draft")  # in the order of their markers
NUM_SKIPPED = 2  # rounds at the start, before which the device had nothing to do
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")
# Calls that return only when the device has done something.
_WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpy2D",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
)
_NUM_KERNELS = 20


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """A kernel's (or copy's) share of a round, means over the rounds. microseconds: by which it
    moved the round on, gaps before it included, so that all together make up the round; running:
    from its starts to its ends, waits for kernels that it overlaps included."""

    name: str
    calls: float
    microseconds: float
    running: float


@dataclasses.dataclass(frozen=True)
class TraceResult:
    """Means over the rounds looked at, in milliseconds, as they ran under the profiler (which
    slows them down).

    round_ms: from one round's first kernel to the next one's. part_ms: spans on the device of
    "draft", "verify" and "copy" (of results), gaps inside included; empty where the parts were not
    marked. between_ms: in which the device did nothing from a round's end to the next one's start;
    gap_ms: in which it did nothing inside a round. num_kernels: of a round. host_waits: calls
    inside a round's launch that wait for the device, by name, over all rounds; other_waits: such
    calls between launches (one a round waits for results). pageable_copies: copies from or to
    memory that is not pinned, inside launches. kernels: the longest.
    """

    num_rounds: int
    round_ms: float
    part_ms: dict[str, float]
    between_ms: float
    gap_ms: float
    num_kernels: float
    host_waits: dict[str, int]
    other_waits: dict[str, int]
    pageable_copies: int
    kernels: tuple[KernelTime, ...]

    @property
    def idle_between_share(self) -> float:
        """Share of the time in which the device waited for the next round."""
        return self.between_ms / self.round_ms

    @property
    def idle_share(self) -> float:
        """Share of the time in which no kernel or copy ran, gaps inside rounds included."""
        return (self.between_ms + self.gap_ms) / self.round_ms


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace in Chrome's format."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


def analyse(events: Iterable[dict[str, Any]]) -> TraceResult | None:
    """What the trace says of the rounds in it; None where no device was traced."""
    whole = [e for e in events if e.get("ph") == "X"]
    rounds = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in whole
        if e.get("name") == ROUND and e.get("cat") == "user_annotation"
    )
    calls = [e for e in whole if e.get("cat") in _ON_HOST]
    starts = [start for start, _ in rounds]

    def round_of(time: float) -> int | None:
        number = bisect.bisect_right(starts, time) - 1
        return number if number >= 0 and time <= rounds[number][1] else None

    launched = {e["args"]["correlation"]: round_of(e["ts"]) for e in calls if _correlated(e)}
    on_device = sorted((e for e in whole if e.get("cat") in _ON_DEVICE), key=lambda e: e["ts"])
    by_round: dict[int, list[dict[str, Any]]] = {}
    for event in on_device:
        number = launched.get(event["args"]["correlation"]) if _correlated(event) else None
        if number is not None:
            by_round.setdefault(number, []).append(event)
    numbers = sorted(by_round)[NUM_SKIPPED:]
    if len(numbers) < 2:
        return None
    first, last = rounds[0][0], rounds[-1][1]  # the recording itself waits before and after
    found = [e for e in calls if e["name"] in _WAITS and first <= e["ts"] <= last]
    waits = [(e["name"], round_of(e["ts"]) is None) for e in found]
    return _summarise(
        [by_round[number] for number in numbers],
        on_device,
        host_waits=dict(Counter(name for name, is_between in waits if not is_between)),
        other_waits=dict(Counter(name for name, is_between in waits if is_between)),
    )


def _correlated(event: dict[str, Any]) -> bool:
    return "correlation" in event.get("args", {})


def _summarise(
    work: Sequence[list[dict[str, Any]]],
    on_device: Sequence[dict[str, Any]],
    *,
    host_waits: dict[str, int],
    other_waits: dict[str, int],
) -> TraceResult:
    """work: by round, what it ran on the device; on_device: all that ran there; both in order. The
    last round ends the time."""
    begins = [events[0]["ts"] for events in work]
    ends = [max(e["ts"] + e["dur"] for e in events) for events in work]
    count = len(work) - 1
    counted = work[:-1]
    spans: dict[str, float] = {}
    for number, events in enumerate(counted):
        for part, span in _part_spans(events, ends[number]):
            spans[part] = spans.get(part, 0.0) + span
    busy = _Busy(on_device)
    idle = sum(busy.idle(start, end) for start, end in zip(begins, begins[1:], strict=False))
    between = sum(busy.idle(end, start) for end, start in zip(ends, begins[1:], strict=False))
    whole = begins[-1] - begins[0]
    per_round = 1 / (1000 * count)  # microseconds of all rounds to milliseconds of one
    kernels = [e for events in counted for e in events if e["cat"] == "kernel"]
    num_kernels = sum(MARKER not in e["name"] for e in kernels)
    copies = [e for events in counted for e in events if "ageable" in e["name"]]
    return TraceResult(
        num_rounds=count,
        round_ms=whole * per_round,
        part_ms={part: span * per_round for part, span in spans.items()},
        between_ms=between * per_round,
        gap_ms=(idle - between) * per_round,
        num_kernels=num_kernels / count,
        host_waits=host_waits,
        other_waits=other_waits,
        pageable_copies=sum(e["cat"] == "gpu_memcpy" for e in copies),
        kernels=_longest(counted),
    )


def _part_spans(events: Sequence[dict[str, Any]], end: float) -> Iterable[tuple[str, float]]:
    """The parts of one round and how long each took: they end with markers, the rest copies
    results. Nothing without markers."""
    marks = [e["ts"] + e["dur"] for e in events if MARKER in e["name"]]
    if len(marks) != len(_PARTS):
        return
    times = [events[0]["ts"], *marks, max(end, marks[-1])]
    for part, start, stop in zip((*_PARTS, "copy"), times, times[1:], strict=False):
        yield part, stop - start


class _Busy:
    """When the device ran something. events: in the order of their starts."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for event in events:
            start, end = event["ts"], event["ts"] + event["dur"]
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def idle(self, start: float, end: float) -> float:
        """Microseconds from start to end in which nothing ran."""
        if end <= start:
            return 0.0
        first = bisect.bisect_right(self._ends, start)
        last = bisect.bisect_left(self._starts, end)
        covered = sum(
            min(self._ends[i], end) - max(self._starts[i], start) for i in range(first, last)
        )
        return end - start - covered


def _longest(work: Sequence[list[dict[str, Any]]]) -> tuple[KernelTime, ...]:
    """By name, what moved rounds on most. Each is charged with the time from the last end before
    its own to its own: kernels that start early and wait for others overlap with them."""
    found: dict[str, list[float]] = {}  # calls, advance, running
    for events in work:
        last = events[0]["ts"]
        for event in sorted(events, key=lambda e: e["ts"] + e["dur"]):
            end = event["ts"] + event["dur"]
            sums = found.setdefault(event["name"], [0.0, 0.0, 0.0])
            for number, value in enumerate((1.0, end - last, event["dur"])):
                sums[number] += value
            last = end
    kernels = [
        KernelTime(name, *(value / len(work) for value in sums))
        for name, sums in found.items()
        if MARKER not in name
    ]
    return tuple(sorted(kernels, key=lambda k: -k.microseconds)[:_NUM_KERNELS])
