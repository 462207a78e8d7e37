"""A shape's benchmark as a table and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
from typing import TYPE_CHECKING, Any

from eyas.bench.report import describe_machine
from eyas.bench.shape_run import ShapeResult, ShapeTimes
from eyas.bench.trace import TraceResult

if TYPE_CHECKING:
    from rich.console import Console

_NUM_SHOWN = 12  # kernels


def to_json(result: ShapeResult, *, command: str, date: datetime.datetime | None = None) -> str:
    """The result as a JSON object: figures, machine, versions, date and command."""
    date = date or datetime.datetime.now(datetime.UTC)
    data = {
        "date": date.isoformat(timespec="seconds"),
        "command": command,
        **describe_machine(result.device),
        **dataclasses.asdict(result),
    }
    for entry, times in zip(data["times"], result.times, strict=True):
        entry["floor_ratio"] = times.floor_ratio
        if times.trace is not None:
            entry["trace"]["idle_between_share"] = times.trace.idle_between_share
            entry["trace"]["idle_share"] = times.trace.idle_share
    return json.dumps(data, indent=2) + "\n"


def render(result: ShapeResult, console: Console) -> None:
    """Print the ceilings, a row for each batch size and kind of round, and what traces show."""
    from rich.text import Text

    about = describe_machine(result.device)
    machine = about["machine"].get("gpu") or f"{about['machine']['cpu']}, {result.threads} threads"
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    ceilings = result.ceilings
    lengths = ", ".join(map(str, result.prompt_tokens))
    lines = [
        f"{machine}; {versions}",
        f"{result.shape}, random weights in {result.dtype}, {lengths} + "
        f"{result.new_tokens} tokens, greedy, without prefill; median of {result.repeats}",
        f"measured: copy {ceilings.copy_rate / 1e12:.3g} TB/s, read "
        f"{ceilings.read_rate / 1e12:.3g} TB/s, {ceilings.product_size}³ product "
        f"{ceilings.product_rate / 1e12:.3g} TFLOP/s",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    console.print(_times_table(result))
    console.print(_cost_table(result))
    traced = [(times, times.trace) for times in result.times if times.trace is not None]
    if traced:
        console.print(_traces_table(traced))
    elif result.profiled and result.device != "cpu":
        console.print("the profiler saw nothing on the device: has it the right to look?")
    for times, trace in traced:
        if times.batch_size == result.times[0].batch_size:
            _render_kernels(times, trace, console)


def _table(title: str, columns: list[str]) -> Any:
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0)
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _times_table(result: ShapeResult) -> Any:
    columns = ["rounds", "batch", "ms a\nround", "(least-most)", "ms a\ntoken", "tok/s"]
    table = _table("speed", [*columns, "tokens a\nround"])
    for times in result.times:
        table.add_row(
            times.rounds,
            str(times.batch_size),
            _ms(times.round_ms.median),
            f"{_ms(times.round_ms.least)}-{_ms(times.round_ms.most)}",
            _ms(times.token_ms.median),
            f"{times.tokens_per_second.median:.0f}",
            f"{times.acceptance_length:.2f}",
        )
    return table


def _cost_table(result: ShapeResult) -> Any:
    columns = ["rounds", "batch", "floor\nms", "times\nfloor", "of read\nrate", "host\nms"]
    table = _table("cost of a round, beside the floor of this run", [*columns, "draft", "verify"])
    for times in result.times:
        table.add_row(
            times.rounds,
            str(times.batch_size),
            _ms(1000 * times.floor.seconds),
            f"{times.floor_ratio:.2f}",
            f"{times.bytes_per_second / result.ceilings.read_rate:.0%}",
            _ms(times.host_ms),
            *(_ms(times.part_ms.get(part)) for part in ("draft", "verify")),
        )
    return table


def _traces_table(traced: list[tuple[ShapeTimes, TraceResult]]) -> Any:
    columns = ["rounds", "batch", "ms a\nround", "draft", "verify", "copy", "idle\nbetween"]
    columns += ["gaps\ninside", "kernels", "host\nwaits", "page-\nable"]
    table = _table("on the device, under the profiler", columns)
    for times, trace in traced:
        table.add_row(
            times.rounds,
            str(times.batch_size),
            _ms(trace.round_ms),
            *(_ms(trace.part_ms.get(part)) for part in ("draft", "verify", "copy")),
            f"{trace.idle_between_share:.1%}",
            f"{trace.gap_ms / trace.round_ms:.1%}",
            f"{trace.num_kernels:.0f}",
            str(sum(trace.host_waits.values())),
            str(trace.pageable_copies),
        )
    return table


def _render_kernels(times: ShapeTimes, trace: TraceResult, console: Console) -> None:
    title = f"what moves a round on: kernels of {times.rounds}, batch {times.batch_size}"
    table = _table(title, ["us a round", "running", "calls", "name"])
    last = table.columns[-1]
    last.justify, last.no_wrap, last.overflow = "left", False, "fold"
    for kernel in trace.kernels[:_NUM_SHOWN]:
        name = kernel.name if len(kernel.name) < 90 else f"{kernel.name[:87]}..."
        shares = (kernel.microseconds, kernel.running)
        table.add_row(*(f"{share:.1f}" for share in shares), f"{kernel.calls:.0f}", name)
    console.print(table)
    console.print(
        f"  calls that wait for the device in {trace.num_rounds} rounds: inside launches "
        f"{_counts(trace.host_waits)}; between them {_counts(trace.other_waits)}",
        soft_wrap=True,
        highlight=False,
    )


def _counts(calls: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(calls.items())) or "none"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
