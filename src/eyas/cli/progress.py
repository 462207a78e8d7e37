"""Progress bars on stderr for downloading, converting, loading and benchmark runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class _ByUnit(ProgressColumn):
    """One column for steps in bytes, another for counted ones."""

    def __init__(self, in_bytes: ProgressColumn, counted: ProgressColumn) -> None:
        super().__init__()
        self._in_bytes, self._counted = in_bytes, counted

    def render(self, task: Task) -> RenderableType:
        column = self._in_bytes if task.fields["in_bytes"] else self._counted
        return column.render(task)


class ProgressBars:
    """Implements models.embedded.Progress with a bar a step; a context manager.

    Where stderr is not a terminal, each finished step in bytes is one plain line instead.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _ByUnit(DownloadColumn(binary_units=True), MofNCompleteColumn()),
            _ByUnit(TransferSpeedColumn(), TextColumn("")),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._finished: set[str] = set()

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, step: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `step` are behind us."""
        self._update(step, done, total, in_bytes=True)
        if done >= total and not self._console.is_terminal and step not in self._finished:
            self._finished.add(step)
            seconds = time.perf_counter() - self._started[step]
            line = f"{step}: {total / 2**20:.0f} MiB in {seconds:.1f} s"
            self._console.print(line, highlight=False, soft_wrap=True)

    def counter(self, step: str) -> Callable[[int, int], None]:
        """A bar for what is counted: call it with (done, total)."""

        def count(done: int, total: int) -> None:
            self._update(step, done, total, in_bytes=False)

        return count

    def _update(self, step: str, done: int, total: int, *, in_bytes: bool) -> None:
        if step not in self._tasks:
            self._started[step] = time.perf_counter()
            self._tasks[step] = self._bars.add_task(step, total=total, in_bytes=in_bytes)
        self._bars.update(self._tasks[step], completed=done, total=total)
