"""`eyas train`: a draft for a target, from prompts to a folder that serves."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from eyas.cli.flags import Command, flag_parameters
from eyas.train.pipeline_settings import STAGES, PipelineSettings
from eyas.train.settings import TrainSettings

_SECONDS_BETWEEN_LINES = 15.0


class StageBars:
    """Implements train.workspace.Reporter with a bar a step; a context manager.

    Where stderr is not a terminal, a step is a plain line every few seconds instead.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_line: dict[str, float] = {}

    def __enter__(self) -> StageBars:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def update(self, step: str, done: int, total: int, note: str = "") -> None:
        """`done` of `total` of a step are behind us."""
        if step not in self._tasks:
            self._tasks[step] = self._bars.add_task(step, total=total, note=note)
            self._last_line[step] = time.monotonic()
        self._bars.update(self._tasks[step], completed=done, total=total, note=note)
        now = time.monotonic()
        is_due = done >= total or now - self._last_line[step] >= _SECONDS_BETWEEN_LINES
        if is_due and not self._console.is_terminal:
            self._last_line[step] = now
            self.say(f"{step}: {done}/{total} {note}".rstrip())

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _help_texts(settings: type) -> dict[str, str]:
    return {f.name: f.metadata["help"] for f in dataclasses.fields(settings) if f.name != "seed"}


def _settings_flags(command: Command) -> Command:
    """Give the command a flag for each field of its parameters `settings` and `training`.

    Their common field, the seed, is one flag.
    """
    texts = {"settings": _help_texts(PipelineSettings), "training": _help_texts(TrainSettings)}
    kinds = {"settings": PipelineSettings, "training": TrainSettings}
    flags = {name: flag_parameters(kinds[name], texts[name]) for name in kinds}
    assert flags["settings"].keys().isdisjoint(flags["training"])
    seed = flag_parameters(PipelineSettings, {"seed": "Of everything that is drawn."})
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name not in kinds]
    shown = [*own, *flags["settings"].values(), *flags["training"].values(), *seed.values()]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        drawn = values.pop("seed")
        made = {}
        for name, kind in kinds.items():
            given = {field: values.pop(field) for field in flags[name]}
            given = {field: value for field, value in given.items() if value is not None}
            made[name] = kind(**given, seed=drawn)
        return command(**values, **made)

    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in shown}
    return run


@_settings_flags
def train(
    *,
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="Target: a local folder, a hub id, or smollm2-135m."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for everything; run again to go on.")
    ],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help='JSONL (.gz): {"prompt": ...}, {"turns": [...]} or {"messages": [...]} a line; '
            "may be repeated.",
        ),
    ] = None,
    eval_prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Prompts to evaluate on, refused in --prompts; may be repeated."
        ),
    ] = None,
    stage: Annotated[
        Literal["all", "regenerate", "vocabulary", "train", "evaluate", "export"],
        typer.Option(help="Only this stage, after those before it."),
    ] = "all",
    settings: PipelineSettings,
    training: TrainSettings,
) -> None:
    """Train an EAGLE-3 draft: regenerate, vocabulary, train, evaluate, export."""
    with StageBars() as bars:
        from eyas.train.pipeline import Pipeline, Task  # heavy: torch

        task = Task(
            target=target,
            out=out,
            prompts=prompts or (),
            eval_prompts=eval_prompts or (),
            settings=settings,
            training=training,
        )
        Pipeline(task, bars).run(STAGES if stage == "all" else (stage,))
