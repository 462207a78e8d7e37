"""`eyas bench`: measured speed, with the outputs checked."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from eyas.cli.errors import EXIT_FINDINGS
from eyas.cli.flags import engine_flags, number_list
from eyas.cli.progress import ProgressBars
from eyas.config import EngineConfig
from eyas.types import EyasError

bench_app = typer.Typer(no_args_is_help=True, help="Measure speed, with the outputs checked.")


Batch = Annotated[
    Any,
    typer.Option(help="Requests at once, one table each.", **number_list("--batch", int)),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(help="Length of every prompt (default 128; with --prompts, each one's own)."),
]
Prompts = Annotated[
    Path | None, typer.Option(help='JSONL with {"prompt": ...} or {"messages": [...]} a line.')
]
NumPrompts = Annotated[
    int | None, typer.Option(help="Prompts a run, in batches (default: one batch).")
]
Against = Annotated[
    Literal["transformers"] | None,
    typer.Option(help="Another engine in the same process, dtype and threads."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there.")
]


@bench_app.command()
@engine_flags(without=("max_batch_size", "prefix_caching"))
def offline(
    *,
    config: EngineConfig,
    batch: Batch = (1,),
    prompt_tokens: PromptTokens = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated, exactly.")] = 128,
    prompts: Prompts = None,
    random_prompts: Annotated[
        bool, typer.Option("--random-prompts", help="Random tokens; not with a draft.")
    ] = False,
    num_prompts: NumPrompts = None,
    against: Against = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each contender.")] = 7,
    threads: Annotated[int | None, typer.Option(help="CPU threads of all contenders.")] = None,
    json_file: JsonFile = None,
) -> int:
    """Time Eyas, with and without a draft, and compare what it says.

    Exits with 2 when outputs differ that must be the same (greedy, in float32).
    """
    with ProgressBars() as bars:
        from eyas.bench import report  # heavy: torch
        from eyas.bench.offline import OfflineSettings, run_offline

        settings = OfflineSettings(
            engine=config,
            batch_sizes=batch,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            prompts_file=prompts,
            random_prompts=random_prompts,
            num_prompts=num_prompts,
            against_transformers=against is not None,
            repeats=repeats,
            threads=threads,
        )
        result = run_offline(settings, progress=bars, on_run=bars.counter("running"))
    report.render(result, Console(highlight=False))
    if json_file is not None:
        try:
            json_file.write_text(report.to_json(result, command=shlex.join(sys.argv)))
        except OSError as error:
            raise EyasError(f"--json {json_file} cannot be written: {error}") from None
    return 0 if result.ok else EXIT_FINDINGS
