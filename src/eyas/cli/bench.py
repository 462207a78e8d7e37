"""`eyas bench`: measured speed, with the outputs checked."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from eyas.cli.errors import EXIT_FINDINGS
from eyas.cli.flags import engine_flags, number_list
from eyas.cli.progress import ProgressBars
from eyas.config import ConfigError, EngineConfig
from eyas.types import EyasError

bench_app = typer.Typer(no_args_is_help=True, help="Measure speed, with the outputs checked.")

# Flags of `offline` that say something only with a model's real weights, or only with random ones.
_OF_MODELS = ("prompts", "random_prompts", "num_prompts", "against")
_OF_SHAPES = ("profile", "trace")

Shape = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Instead of MODEL: random weights in this shape (llama-3.1-8b, llama-3.2-1b, "
        "qwen3-8b, tiny, or the path of a config.json), with a random draft and simulated "
        "acceptance.",
    ),
]
Batch = Annotated[
    Any,
    typer.Option(
        help="Requests at once (default 1; with --shape 1,4,16,64).", **number_list("--batch", int)
    ),
]
PromptTokens = Annotated[
    Any,
    typer.Option(
        help="Length of every prompt (default 128; with --prompts, each one's own; with --shape "
        "512, or several lengths, the last one of all further prompts).",
        **number_list("--prompt-tokens", int),
    ),
]
NewTokens = Annotated[
    int | None, typer.Option(help="Tokens generated, exactly (default 128; with --shape 256).")
]
Prompts = Annotated[
    Path | None, typer.Option(help='JSONL with {"prompt": ...} or {"messages": [...]} a line.')
]
RandomPrompts = Annotated[
    bool, typer.Option("--random-prompts", help="Random tokens; not with a draft.")
]
NumPrompts = Annotated[
    int | None, typer.Option(help="Prompts a run, in batches (default: one batch).")
]
Against = Annotated[
    Literal["transformers"] | None,
    typer.Option(help="Another engine in the same process, dtype and threads."),
]
Repeats = Annotated[
    int | None, typer.Option(help="Timed runs of each kind (default 7; with --shape 3).")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads of all contenders.")]
Profile = Annotated[
    bool | None,
    typer.Option(help="With --shape: also record 100 rounds, for where their time goes (default)."),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --shape: keep the recording of the first batch size, for chrome://tracing.",
    ),
]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also draw the result there (.png, .svg, .pdf).")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there.")
]


def _model_or_shape(given: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A shape takes the place of MODEL and brings its draft."""
    shape = own["shape"]
    if shape is None:
        if "model" not in given:
            raise ConfigError("give a MODEL, or --shape for random weights")
        return given
    if "model" in given:
        raise ConfigError("MODEL and --shape exclude each other: leave one out")
    from eyas.bench.shapes import with_draft_defaults

    return with_draft_defaults(given | {"model": shape})


@bench_app.command()
@engine_flags(without=("max_batch_size", "prefix_caching"), complete=_model_or_shape)
def offline(
    *,
    config: EngineConfig,
    shape: Shape = None,
    batch: Batch = None,
    prompt_tokens: PromptTokens = None,
    new_tokens: NewTokens = None,
    prompts: Prompts = None,
    random_prompts: RandomPrompts = False,
    num_prompts: NumPrompts = None,
    against: Against = None,
    repeats: Repeats = None,
    threads: Threads = None,
    profile: Profile = None,
    trace: Trace = None,
    plot: Plot = None,
    json_file: JsonFile = None,
) -> int:
    """Time Eyas, with and without a draft.

    With a model its outputs are compared: exits with 2 when they differ and must be the same
    (greedy, in float32). With --shape there are no files: what rounds cost is measured, beside
    what they must cost on this machine.
    """
    values = {
        "batch_sizes": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "threads": threads,
        "prompts_file": prompts,
        "random_prompts": random_prompts or None,
        "num_prompts": num_prompts,
        "against": against,
        "profile": profile,
        "trace": trace,
    }
    given = {name: value for name, value in values.items() if value is not None}
    run = _offline_model if shape is None else _offline_shape
    return run(config, given, plot=plot, json_file=json_file)


def _offline_model(
    config: EngineConfig, given: dict[str, Any], *, plot: Path | None, json_file: Path | None
) -> int:
    _refuse(given, _OF_SHAPES, "needs --shape")
    if "prompt_tokens" in given:
        given["prompt_tokens"], *more = given["prompt_tokens"]
        if more:
            raise ConfigError("several --prompt-tokens need --shape: give one length")
    with ProgressBars() as bars:
        from eyas.bench import report  # heavy: torch
        from eyas.bench.offline import OfflineSettings, run_offline

        is_against = given.pop("against", None) is not None
        settings = OfflineSettings(engine=config, against_transformers=is_against, **given)
        result = run_offline(settings, progress=bars, on_run=bars.counter("running"))
    report.render(result, Console(highlight=False))
    write_json(json_file, lambda: report.to_json(result, command=shlex.join(sys.argv)))
    if plot is not None:
        from eyas.bench.plot import plot_offline

        plot_offline(result, plot)
    return 0 if result.ok else EXIT_FINDINGS


def _offline_shape(
    config: EngineConfig, given: dict[str, Any], *, plot: Path | None, json_file: Path | None
) -> int:
    _refuse(given, _OF_MODELS, "does not go with --shape, whose weights are random")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read once, when torch is imported
    with ProgressBars() as bars:
        from eyas.bench import shape_report  # heavy: torch
        from eyas.bench.shape_run import ShapeSettings, run_shape

        settings = ShapeSettings(engine=config, **given)
        result = run_shape(settings, on_run=bars.counter("running"))
    shape_report.render(result, Console(highlight=False))
    write_json(json_file, lambda: shape_report.to_json(result, command=shlex.join(sys.argv)))
    if plot is not None:
        from eyas.bench.plot import plot_shape

        plot_shape(result, plot)
    return 0


def _refuse(given: Mapping[str, Any], names: tuple[str, ...], why: str) -> None:
    for name in names:
        if name in given or (name == "prompts" and "prompts_file" in given):
            raise ConfigError(f"--{name.replace('_', '-')} {why}: leave it out")


def write_json(path: Path | None, make: Callable[[], str]) -> None:
    """Write a result's JSON where it was asked for. Raises EyasError where that cannot be."""
    if path is None:
        return
    try:
        path.write_text(make())
    except OSError as error:
        raise EyasError(f"--json {path} cannot be written: {error}") from None
