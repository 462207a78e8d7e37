"""A benchmark's result as a table and as JSON, with what is needed to run it again."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.bench.results import Acceptance, BatchResult, OfflineResult, OutputCheck, Spread

if TYPE_CHECKING:
    from rich.console import Console

_PACKAGES = ("eyas", "torch", "transformers")


def describe_machine(device: str) -> dict[str, Any]:
    """The processor, the GPU where one was used, and the versions of what ran."""
    import torch

    machine: dict[str, Any] = {"cpu": _cpu_name(), "system": platform.platform()}
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda
    versions = {name: package_version(name) for name in _PACKAGES}
    return {"machine": machine, "versions": {"python": platform.python_version(), **versions}}


def package_version(name: str) -> str:
    """Of an installed package, or of one that is run from its sources."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module(name).__version__)


def to_json(result: OfflineResult, *, command: str, date: datetime.datetime | None = None) -> str:
    """The result as a JSON object: figures, machine, versions, date and command."""
    date = date or datetime.datetime.now(datetime.UTC)
    data = {
        "date": date.isoformat(timespec="seconds"),
        "command": command,
        **describe_machine(result.device),
        "ok": result.ok,
        **dataclasses.asdict(result),
    }
    return json.dumps(data, indent=2) + "\n"


def render(result: OfflineResult, console: Console) -> None:
    """Print the tables, one a batch size, and what there is to say about the outputs."""
    from rich.text import Text

    about = describe_machine(result.device)
    machine = about["machine"].get("gpu") or f"{about['machine']['cpu']}, {result.threads} threads"
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    shortest, longest = result.prompt_tokens
    lengths = f"{longest}" if shortest == longest else f"{shortest}-{longest}"
    lines = [
        f"{machine}; {versions}",
        f"{result.dtype}, {lengths} + {result.new_tokens} tokens, greedy; median (least-most) of "
        f"{result.repeats} interleaved repeats",
        f"memory reads {_gib(result.bandwidth.median)} GiB/s "
        f"({_gib(result.bandwidth.least)}-{_gib(result.bandwidth.most)})",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    for batch in result.batches:
        _render_batch(batch, result, console)


def _render_batch(batch: BatchResult, result: OfflineResult, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    title = f"batch {batch.batch_size}"
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
    )
    columns = ("decode\ntok/s", "with\nprefill", f"times\n{result.baseline}")
    table.add_column(no_wrap=True)
    for column in (*columns, "tokens/\nforward", "of\nceiling"):
        table.add_column(column, justify="right")
    for one in batch.results:
        table.add_row(
            one.contender,
            _spread(one.decode),
            _number(one.whole.median),
            _spread(one.ratio, digits=2) if one.ratio else "1",
            _acceptance(one.acceptance),
            f"{one.ceiling_share:.0%}",
        )
    console.print(table)
    distinct, bigrams = batch.distinct_bigrams
    notes = [
        f"ceiling of plain decoding: {batch.ceiling.tokens_per_second:.0f} tok/s, reading "
        f"{batch.ceiling.step_bytes / 2**20:.0f} MiB of weights and keys and values a step",
        f"outputs of {result.baseline}: {distinct} of {bigrams} bigrams are distinct",
        *(describe_check(check, must_agree=result.must_agree) for check in batch.checks),
    ]
    for one in batch.results:
        if one.acceptance is not None and one.acceptance.num_looping:
            notes.append(_loop_note(one.contender, one.acceptance))
        if one.acceptance is not None and one.acceptance.is_simulated:
            notes.append(f"{one.contender}: acceptance is simulated, the output is not the model's")
    for note in notes:
        console.print(Text(f"  {note}"), soft_wrap=True)


def describe_check(check: OutputCheck, *, must_agree: bool) -> str:
    """One line on how two contenders' outputs compare."""
    who = f"{check.contender} and {check.reference}"
    if check.equal:
        return f"{who}: same tokens in all {check.num_outputs} outputs"
    assert check.tokens is not None
    gap = "" if check.logit_gap is None else f", logits {abs(check.logit_gap):.2g} apart"
    verdict = ""
    if check.is_near_tie:
        verdict = " (a near tie)"
    elif must_agree:
        verdict = " (WRONG: in float32 they must agree)"
    return (
        f"{who}: {check.num_equal} of {check.num_outputs} outputs are the same; output "
        f"{check.prompt} differs first at token {check.position}: {check.tokens[1]} instead of "
        f"{check.tokens[0]}{gap}{verdict}"
    )


def _loop_note(contender: str, acceptance: Acceptance) -> str:
    count = f"{acceptance.num_looping} of {acceptance.num_outputs} outputs repeat themselves"
    what = "no acceptance is given" if acceptance.length is None else "acceptance leaves them out"
    return f"{contender}: {count}; {what}, and the speed flatters the draft"


def _acceptance(acceptance: Acceptance | None) -> str:
    if acceptance is None:
        return ""
    return "looped" if acceptance.length is None else f"{acceptance.length:.2f}"


def _spread(spread: Spread, *, digits: int = 1) -> str:
    median, least, most = (
        _number(number, digits) for number in (spread.median, spread.least, spread.most)
    )
    return f"{median} ({least}-{most})"


def _number(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}" if value < 100 else f"{value:.0f}"


def _gib(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 2**30:.1f}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
