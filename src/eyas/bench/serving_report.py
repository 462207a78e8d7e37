"""A benchmark over HTTP as a table and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
from typing import TYPE_CHECKING

from eyas.bench.report import package_version
from eyas.bench.serving_results import Percentiles, RateResult, ServingResult

if TYPE_CHECKING:
    from rich.console import Console

MAX_LAG = 0.05  # seconds; a client that is later than that cannot keep up


def to_json(result: ServingResult, *, command: str, date: datetime.datetime | None = None) -> str:
    """The result as a JSON object, with date, command and the client's version."""
    date = date or datetime.datetime.now(datetime.UTC)
    data = {
        "date": date.isoformat(timespec="seconds"),
        "command": command,
        "client": f"eyas {package_version('eyas')}",
        "ok": result.ok,
        **dataclasses.asdict(result),
    }
    return json.dumps(data, indent=2) + "\n"


def render(result: ServingResult, console: Console) -> None:
    """Print a row for each rate, and what there is to say about errors and outputs."""
    from rich.table import Table
    from rich.text import Text

    goals = result.goals
    lines = [
        f"{result.model} on {result.url}: open-loop Poisson arrivals, streamed, at most "
        f"{result.max_tokens} tokens, temperature {result.temperature:g}",
        f"good: first token within {goals.first_token:g} s, then {1000 * goals.inter_token:g} ms a "
        "token on average",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    table = Table(box=None, padding=(0, 1, 0, 0))
    columns = ["requests/s\nasked", "done", "good", "tok/s", "first token, ms\np50 / p90 / p99"]
    columns += ["between tokens, ms\np50 / p90 / p99", "tokens/\nround", "errors"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for rate in result.rates:
        table.add_row(
            f"{rate.rate:g}",
            f"{rate.requests_per_second:.2f}",
            f"{rate.goodput:.2f}",
            f"{rate.tokens_per_second:.0f}",
            _milliseconds(rate.first_token),
            _milliseconds(rate.inter_token),
            _acceptance(rate),
            str(sum(rate.errors.values())),
        )
    console.print(table)
    for rate in result.rates:
        for note in notes(rate):
            console.print(Text(f"  {rate.rate:g} requests/s: {note}"), soft_wrap=True)


def notes(rate: RateResult) -> list[str]:
    """What a reader of one rate's figures must know."""
    found = []
    if rate.errors:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(rate.errors.items()))
        found.append(f"{sum(rate.errors.values())} of {rate.num_requests} requests failed: {kinds}")
    acceptance = rate.acceptance
    if acceptance.num_looping:
        found.append(
            f"{acceptance.num_looping} of {acceptance.num_outputs} outputs repeat themselves; no "
            "acceptance is given, and the speed flatters a draft"
        )
    if rate.num_cached_tokens:
        share = rate.num_cached_tokens / rate.num_prompt_tokens
        found.append(f"the prefix cache had {share:.0%} of the prompts' tokens")
    if rate.client_lag > MAX_LAG:
        found.append(
            f"the client sent a request {1000 * rate.client_lag:.0f} ms late: it may be what limits"
        )
    return found


def _acceptance(rate: RateResult) -> str:
    if rate.acceptance.num_looping:
        return "looped"
    return "" if rate.acceptance.length is None else f"{rate.acceptance.length:.2f}"


def _milliseconds(times: Percentiles | None) -> str:
    if times is None:
        return "-"
    return " / ".join(_number(1000 * value) for value in (times.p50, times.p90, times.p99))


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
