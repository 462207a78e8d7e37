"""Benchmarks as pictures (needs the extra `train`: matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.bench.results import OfflineResult
from eyas.bench.serving_results import Percentiles, ServingResult
from eyas.bench.shape_run import ShapeResult
from eyas.types import EyasError


def plot_shape(result: ShapeResult, picture: Path) -> None:
    """Draw the time of a round beside its floor, and tokens a second, over the batch size.

    picture: a .png, .svg or .pdf file. Raises EyasError without matplotlib or where the file
    cannot be written.
    """
    figure = new_figure(width=10, height=4)
    rounds_axes, tokens_axes = figure.subplots(1, 2)
    for number, name in enumerate(dict.fromkeys(times.rounds for times in result.times)):
        found = [times for times in result.times if times.rounds == name]
        sizes = [times.batch_size for times in found]
        color = f"C{number}"
        medians = [times.round_ms.median for times in found]
        below = [times.round_ms.median - times.round_ms.least for times in found]
        above = [times.round_ms.most - times.round_ms.median for times in found]
        rounds_axes.errorbar(
            sizes, medians, (below, above), color=color, marker="o", capsize=3, label=name
        )
        floors = [1000 * times.floor.seconds for times in found]
        rounds_axes.plot(sizes, floors, color=color, linestyle=":", label=f"{name}: floor")
        speeds = [times.tokens_per_second.median for times in found]
        tokens_axes.plot(sizes, speeds, color=color, marker="o", label=name)
    rounds_axes.set_ylabel("ms a round")
    rounds_axes.set_ylim(bottom=0)
    tokens_axes.set_ylabel("tokens a second")
    tokens_axes.set_yscale("log")
    for axes in (rounds_axes, tokens_axes):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests at once")
        axes.set_xticks([times.batch_size for times in result.times])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(f"{result.shape}, {result.dtype}, {result.device}")
    save(figure, picture)


def plot_offline(result: OfflineResult, picture: Path) -> None:
    """Draw each contender's decoding speed with its range, and the ceiling, over the batch size.

    picture: a .png, .svg or .pdf file. Raises EyasError without matplotlib or where the file
    cannot be written.
    """
    figure = new_figure(width=6, height=4)
    axes = figure.subplots()
    sizes = [batch.batch_size for batch in result.batches]
    for column, name in enumerate(one.contender for one in result.batches[0].results):
        speeds = [batch.results[column].decode for batch in result.batches]
        below = [speed.median - speed.least for speed in speeds]
        above = [speed.most - speed.median for speed in speeds]
        medians = [speed.median for speed in speeds]
        axes.errorbar(sizes, medians, (below, above), marker="o", capsize=3, label=name)
    ceilings = [batch.ceiling.tokens_per_second for batch in result.batches]
    axes.plot(sizes, ceilings, color="black", linestyle=":", label="ceiling of plain decoding")
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens a second, without prefill")
    axes.set_xticks(sizes)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(f"{result.dtype}, {result.device}")
    save(figure, picture)


def plot_serving(result: ServingResult, picture: Path) -> None:
    """Draw latencies and throughput over the arrival rate.

    picture: a .png, .svg or .pdf file. Raises EyasError without matplotlib or where the file
    cannot be written.
    """
    figure = new_figure(width=12, height=3.6)
    first, between, requests = figure.subplots(1, 3)
    rates = [rate.rate for rate in result.rates]
    for axes, name, times in (
        (first, "first token", [rate.first_token for rate in result.rates]),
        (between, "between tokens", [rate.inter_token for rate in result.rates]),
    ):
        _plot_percentiles(axes, rates, times)
        axes.set_ylabel(f"{name}, ms")
    requests.plot(rates, rates, color="black", linestyle=":", label="asked")
    done = [rate.requests_per_second for rate in result.rates]
    requests.plot(rates, done, marker="o", label="done")
    requests.plot(rates, [rate.goodput for rate in result.rates], marker="o", label="good")
    requests.set_ylabel("requests a second")
    for axes in (first, between, requests):
        axes.set_xlabel("requests a second asked")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(result.model)
    save(figure, picture)


def _plot_percentiles(axes: Any, rates: list[float], times: list[Percentiles | None]) -> None:
    found = [(rate, one) for rate, one in zip(rates, times, strict=True) if one is not None]
    for name in ("p50", "p90", "p99"):
        values = [1000 * getattr(one, name) for _, one in found]
        axes.plot([rate for rate, _ in found], values, marker="o", label=name)


def new_figure(*, width: float, height: float) -> Any:
    """An empty figure, sizes in inches. Raises EyasError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EyasError("figures need matplotlib: pip install 'eyas[train]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, picture: Path) -> None:
    """Write a figure. Raises EyasError for a kind of file that is not known and for a file that
    cannot be written."""
    try:
        figure.savefig(picture)
    except (OSError, ValueError) as error:
        raise EyasError(f"--plot {picture} cannot be written: {error}") from None
