"""The whole benchmark of a tiny shape on a CPU."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from eyas.bench import bandwidth, ceilings, shape_report, shape_run
from eyas.bench.plot import plot_shape
from eyas.bench.rounds import Batch
from eyas.bench.shape_report import render, to_json
from eyas.bench.shape_run import ShapeResult, ShapeSettings, run_shape
from eyas.bench.shapes import with_draft_defaults
from eyas.bench.trace import ROUND, KernelTime, TraceResult, read_trace
from eyas.config import ConfigError, EngineConfig
from eyas.types import EyasError

NUM_PROFILED = 5


def settings(**changes: object) -> ShapeSettings:
    given = with_draft_defaults({"model": "tiny", "dtype": "float32", "device": "cpu"})
    values = {"prompt_tokens": (24,), "new_tokens": 40, "repeats": 2, "threads": 1}
    return ShapeSettings(engine=EngineConfig(**given), **(values | changes))


@pytest.fixture(scope="module")
def small() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bandwidth._BUFFER_BYTES, "cpu", 2**20)
        patch.setitem(ceilings._COPY_BYTES, "cpu", 2**20)
        patch.setitem(ceilings._PRODUCT_SIZE, "cpu", 64)
        patch.setattr(shape_run, "NUM_PROFILED", NUM_PROFILED)
        yield


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.json"


@pytest.fixture(scope="module")
def result(small: object, trace: Path) -> ShapeResult:
    return run_shape(settings(batch_sizes=(1, 3), trace=trace))


def test_what_is_measured(result: ShapeResult) -> None:
    rounds = [(times.rounds, times.batch_size) for times in result.times]
    assert rounds == [("plain", 1), ("plain", 3), ("chain-3", 1), ("chain-3", 3)]
    assert (result.shape, result.dtype, result.device) == ("tiny", "float32", "cpu")
    for times in result.times:
        assert 0 < times.round_ms.least <= times.round_ms.median <= times.round_ms.most
        assert set(times.part_ms) == {"draft", "verify"} and times.trace is None
        assert 0 < times.host_ms < times.round_ms.most
        whole = times.host_ms + sum(times.part_ms.values())
        assert whole < 1.5 * times.round_ms.most  # the parts are a part of it
        rate = 1000 * times.batch_size * times.acceptance_length / times.round_ms.least
        assert times.tokens_per_second.most == pytest.approx(rate)
        assert times.floor_ratio == pytest.approx(
            times.round_ms.median / 1000 / times.floor.seconds
        )


def test_plain_rounds_emit_one_token(result: ShapeResult) -> None:
    for times in result.times[:2]:
        assert times.acceptance_length == 1.0
        assert times.num_rounds >= 36  # of 40 tokens; the first rounds are not timed
        assert times.token_ms == times.round_ms


def test_acceptance_is_simulated(result: ShapeResult) -> None:
    for times in result.times[2:]:
        assert 2.2 < times.acceptance_length < 3.8
        assert times.floor.num_bytes > result.times[0].floor.num_bytes


def test_the_trace_holds_the_rounds(result: ShapeResult, trace: Path) -> None:
    names = [event.get("name") for event in read_trace(trace)]
    assert names.count(ROUND) == NUM_PROFILED


def test_json(result: ShapeResult) -> None:
    data = json.loads(to_json(result, command="eyas bench offline --shape tiny"))
    assert {"date", "command", "machine", "versions", "ceilings", "cost"} <= set(data)
    assert [entry["rounds"] for entry in data["times"]] == [t.rounds for t in result.times]
    assert data["times"][0]["floor_ratio"] == result.times[0].floor_ratio


def with_traces(result: ShapeResult) -> ShapeResult:
    """As on a GPU."""
    trace = TraceResult(
        num_rounds=97,
        round_ms=1.25,
        part_ms={"draft": 0.375, "verify": 0.75, "copy": 0.0625},
        between_ms=0.025,
        gap_ms=0.125,
        num_kernels=231,
        host_waits={"cudaStreamSynchronize": 4},
        other_waits={"cudaEventSynchronize": 100},
        pageable_copies=2,
        kernels=(KernelTime("k" * 200, 64, 812.0, 900.0),),
    )
    times = [shape_run._with_trace(one, trace) for one in result.times]
    return shape_run.dataclasses.replace(result, times=tuple(times))


@pytest.mark.parametrize("width", [80, 160])
def test_tables(result: ShapeResult, width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    render(with_traces(result), console)
    text = console.export_text()
    assert "…" not in text and "TFLOP/s" in text
    assert "cudaStreamSynchronize 4" in text
    lines = [line.split() for line in text.splitlines()]
    rows = [line for line in lines if line[:2] == ["chain-3", "3"]]
    assert len(rows) == 3
    assert rows[2][2:] == [*("1.250", "0.375", "0.750", "0.062", "2.0%", "10.0%", "231", "4", "2")]


def test_a_profiler_that_sees_nothing_is_told(result: ShapeResult) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        about = {"machine": {"gpu": "a GPU"}, "versions": {}}
        patch.setattr(shape_report, "describe_machine", lambda device: about)
        render(shape_run.dataclasses.replace(result, device="cuda"), console)
    assert "the profiler saw nothing on the device" in console.export_text()


def test_trace_figures_in_json(result: ShapeResult) -> None:
    data = json.loads(to_json(with_traces(result), command=""))
    assert data["times"][0]["trace"]["idle_between_share"] == pytest.approx(0.02)
    assert data["times"][0]["trace"]["idle_share"] == pytest.approx(0.12)


def test_plot(result: ShapeResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_shape(result, tmp_path / "p.svg")
    assert "chain-3: floor" in (tmp_path / "p.svg").read_text() or (
        (tmp_path / "p.svg").stat().st_size > 10_000
    )
    with pytest.raises(EyasError, match="--plot"):
        plot_shape(result, tmp_path / "p.unknown")


def test_plain_alone(small: object) -> None:
    given = with_draft_defaults({"model": "tiny", "draft": "none", "device": "cpu"})
    seen: list[tuple[int, int]] = []
    found = run_shape(
        ShapeSettings(
            engine=EngineConfig(**given),
            batch_sizes=(2,),
            prompt_tokens=(8,),
            new_tokens=8,
            repeats=1,
            threads=1,
            profile=False,
        ),
        on_run=lambda done, total: seen.append((done, total)),
    )
    (times,) = found.times
    assert (times.rounds, found.dtype) == ("plain", "bfloat16")
    assert found.cost.fc_bytes == 0 and seen == [(1, 1)]


def test_one_long_prompt_beside_short_ones(small: object) -> None:
    given = settings(batch_sizes=(1, 3), prompt_tokens=(100, 10), profile=False, repeats=1)
    assert given.lengths(1) == [100] and given.lengths(3) == [100, 10, 10]
    config = given.engine_config()
    assert config.max_model_len == 140
    assert config.kv_cache_tokens is not None
    assert 240 < config.kv_cache_tokens < 240 + 3 * 64  # not three times the longest
    found = run_shape(given)
    for times, prompt_tokens in zip(found.times[:2], (100, 120), strict=True):
        assert times.rounds == "plain"  # a token a round and request
        context = prompt_tokens + times.batch_size * times.num_rounds / 2
        expected = found.cost.target_bytes + found.cost.target_kv_bytes * context
        assert times.floor.num_bytes == expected


def test_a_batch_leaves_nothing_behind(small: object, tmp_path: Path) -> None:
    one = settings(batch_sizes=(2,), profile=False)
    config = shape_run.write_shape(one.engine_config(), tmp_path)
    bench = shape_run._ShapeBench(one, config, tmp_path, lambda done, total: None)
    engine = bench._engine(bench.configs[1], bench.reports[1])
    with Batch(engine, bench.prompts, 40) as batch:
        sample = batch.run(4)
        assert (sample.num_rounds, sample.batch_size) == (4, 2)
        assert len(engine.requests) == 2
    assert not engine.has_work and not engine.requests
    with Batch(engine, bench.prompts, 40) as batch:
        until_end = batch.run()
        assert until_end.num_rounds > 4
        with pytest.raises(EyasError, match="--new-tokens is too low"):
            batch.run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": ()}, "--batch must be at least 1"),
        ({"batch_sizes": (2, 0)}, "--batch must be at least 1"),
        ({"repeats": 0}, "--repeats must"),
        ({"prompt_tokens": (9, 0)}, "--prompt-tokens must"),
        ({"threads": 0}, "--threads must"),
        ({"new_tokens": 15}, "--new-tokens must be at least 16"),
        ({"profile": False, "trace": Path("t")}, "leave --no-profile out"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes)
