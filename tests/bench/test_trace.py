"""What is read from a trace, with traces written by hand: times in microseconds."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eyas.bench.trace import MARKER, ROUND, TraceResult, analyse, read_trace

PERIOD, LAUNCH = 1000, 50


def event(name: str, category: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "args": args}


def one_round(number: int, *, marked: bool = True) -> list[dict[str, Any]]:
    """Launched one period before it runs: 100 draft, 600 verify with a gap of 20, 80 draft, a
    copy of 20; then nothing for 200."""
    launch, start = number * PERIOD, (number + 1) * PERIOD
    found = [
        event(ROUND, "user_annotation", launch, LAUNCH),
        event(ROUND, "gpu_user_annotation", start, 800),
        event("cudaGraphLaunch", "cuda_runtime", launch + 1, 40, correlation=number),
        event("cudaMemcpyAsync", "cuda_runtime", launch + 42, 2, correlation=10_000 + number),
        event("cudaEventSynchronize", "cuda_runtime", launch + 700, 100, correlation=20_000),
        event("small", "kernel", start, 100, correlation=number),
        event("matmul", "kernel", start + 100, 300, correlation=number),
        event("matmul", "kernel", start + 420, 280, correlation=number),
        event("small", "kernel", start + 700, 80, correlation=number),
        event("Memcpy DtoH", "gpu_memcpy", start + 780, 20, correlation=10_000 + number),
        event("elsewhere", "kernel", start, 5, correlation=99_999),
        {"ph": "f", "name": "ac2g", "cat": "ac2g", "ts": start},
    ]
    if marked:
        ends = (100, 700, 780)
        marks = [event(f"x::{MARKER}", "kernel", start + e, 0, correlation=number) for e in ends]
        found += marks
    return found


def rounds(count: int, **settings: Any) -> list[dict[str, Any]]:
    return [e for number in range(count) for e in one_round(number, **settings)]


def looked_at(events: list[dict[str, Any]]) -> TraceResult:
    result = analyse(events)
    assert result is not None
    return result


def test_where_the_time_goes() -> None:
    result = looked_at(rounds(8))
    assert result.num_rounds == 5  # two are skipped, and the last one ends the time
    assert result.round_ms == pytest.approx(1.0)
    assert result.part_ms == pytest.approx({"draft": 0.18, "verify": 0.6, "copy": 0.02})
    assert (result.between_ms, result.gap_ms) == pytest.approx((0.2, 0.02))
    assert (result.idle_between_share, result.idle_share) == pytest.approx((0.2, 0.22))
    assert result.num_kernels == 4
    assert [(k.name, k.calls, k.microseconds, k.running) for k in result.kernels] == [
        ("matmul", 2, pytest.approx(600), pytest.approx(580)),  # with the gap before the second
        ("small", 2, pytest.approx(180), pytest.approx(180)),
        ("Memcpy DtoH", 1, pytest.approx(20), pytest.approx(20)),
    ]


def test_kernels_that_start_early_are_charged_once() -> None:
    events = []
    for number in range(6):
        start = (number + 1) * PERIOD
        events += [
            event(ROUND, "user_annotation", number * PERIOD, LAUNCH),
            event("cudaGraphLaunch", "cuda_runtime", number * PERIOD, 9, correlation=number),
            event("first", "kernel", start, 100, correlation=number),
            event("second", "kernel", start + 10, 190, correlation=number),  # waits until 100
        ]
    times = {k.name: (k.microseconds, k.running) for k in looked_at(events).kernels}
    assert times == {
        "first": pytest.approx((100, 100)),
        "second": pytest.approx((100, 190)),
    }


def test_parts_need_their_markers() -> None:
    result = looked_at(rounds(6, marked=False))
    assert result.part_ms == {} and result.round_ms == pytest.approx(1.0)


def test_waits_are_told_apart() -> None:
    events = rounds(6)
    events.append(event("cudaDeviceSynchronize", "cuda_runtime", -5, 1))
    events.append(event("cudaDeviceSynchronize", "cuda_runtime", 6 * PERIOD, 1))
    result = looked_at(events)
    assert (result.host_waits, result.other_waits) == ({}, {"cudaEventSynchronize": 5})
    events.append(event("cudaStreamSynchronize", "cuda_runtime", 3 * PERIOD + 10, 5))
    events.append(event("cudaMemcpy", "cuda_runtime", 4 * PERIOD + 10, 5))
    assert looked_at(events).host_waits == {"cudaMemcpy": 1, "cudaStreamSynchronize": 1}


def test_pageable_copies_are_counted() -> None:
    events = rounds(6)
    start = 4 * PERIOD
    events.append(event("cudaMemcpyAsync", "cuda_runtime", start + 5, 1, correlation=555))
    name = "Memcpy HtoD (Pageable -> Device)"
    events.append(event(name, "gpu_memcpy", start + PERIOD + 1, 2, correlation=555))
    assert looked_at(events).pageable_copies == 1


def test_work_of_others_between_rounds_is_no_idle_time() -> None:
    events = rounds(6)
    for number in range(6):  # a copy launched outside of a round
        start = (number + 1) * PERIOD
        events.append(event("Memcpy HtoD", "gpu_memcpy", start + 850, 50, correlation=77))
    result = looked_at(events)
    assert (result.between_ms, result.gap_ms) == pytest.approx((0.15, 0.02))
    assert result.round_ms == pytest.approx(1.0)


def test_overlapping_kernels_count_once() -> None:
    events = rounds(6)
    for number in range(6):
        start = (number + 1) * PERIOD
        events.append(event("beside", "kernel", start + 50, 600, correlation=number))
    result = looked_at(events)
    assert result.gap_ms == pytest.approx(0.0)  # the gap is covered
    assert result.round_ms == pytest.approx(1.0)


def test_no_device_no_result() -> None:
    assert analyse([e for e in rounds(6) if e.get("cat") == "user_annotation"]) is None
    assert analyse([]) is None


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_files(tmp_path: Path, name: str) -> None:
    data = json.dumps({"traceEvents": rounds(2)}).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read_trace(tmp_path / name) == rounds(2)
