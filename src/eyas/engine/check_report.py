"""What the contract check found, for people, for scripts and for the engine."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from eyas.engine.memory_plan import MemoryPlan
from eyas.models.config import DraftConfig, ModelConfig
from eyas.types import CheckError, Finding, Severity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.SKIPPED: "cyan"}
_ORDER = list(_STYLES)


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of `--explain`. Rows share their keys; those that end in "bytes" are sizes."""

    title: str
    note: str
    rows: tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """All findings, and what was understood of the models.

    target, draft, plan: None where errors left nothing to show (draft: or none was asked for).
    facts: short texts by label, in the order of reading, for `render` and the log: what was
    chosen (device, dtype, boundaries and the rule behind them). seconds: how long the check took.
    sections: the plan at length, for `render_explain`.
    """

    findings: tuple[Finding, ...]
    target: ModelConfig | None
    draft: DraftConfig | None
    plan: MemoryPlan | None
    facts: dict[str, str]
    seconds: float
    sections: tuple[Section, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing stops `serve`; warnings and skipped checks do not."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)

    def of(self, severity: Severity) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity is severity]

    def raise_on_errors(self) -> None:
        """Raise CheckError, which carries all findings, unless `ok`."""
        if not self.ok:
            raise CheckError(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "ok": self.ok,
            "findings": [_plain(finding) for finding in self.findings],
            "facts": self.facts,
            "explain": [_plain(section) for section in self.sections],
            "plan": _plain(self.plan) if self.plan else None,
            "target": _plain(self.target) if self.target else None,
            "draft": _plain(self.draft) if self.draft else None,
            "seconds": round(self.seconds, 3),
        }

    def to_json(self) -> str:
        """The report as a JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def render(self, console: Console) -> None:
        """Print the report: what was understood, then errors, warnings and skipped checks."""
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column()
        for label, text in self.facts.items():
            table.add_row(label, Text(text))
        console.print(table)
        for severity in _ORDER:
            for finding in self.of(severity):
                head = Text(severity.value, style=_STYLES[severity])
                head.append(f" [{finding.subject}] {finding.code}", style="bold")
                console.print(head)
                console.print(Padding(Text(finding.message), (0, 0, 0, 2)))
                if finding.hint:
                    console.print(Padding(Text(f"→ {finding.hint}"), (0, 0, 0, 2)))
        console.print(Text(self.summary(), style="green" if self.ok else "bold red"))

    def render_explain(self, console: Console) -> None:
        """Print the plan at length: boundaries and their rule, shapes, KV layouts, bytes by part,
        backends. `to_dict` has the same under "explain"."""
        from rich.table import Table
        from rich.text import Text

        for section in self.sections:
            console.print(Text(section.title, style="bold"), Text(section.note), sep="  ")
            columns = list(section.rows[0])
            table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
            for column in columns:
                is_number = all(isinstance(row[column], int) for row in section.rows)
                heading = column.removesuffix("_bytes").replace("_", " ")
                table.add_column(heading, justify="right" if is_number else "left")
            for row in section.rows:
                table.add_row(*(_cell(column, row[column]) for column in columns))
            console.print(table)
            console.print()

    def summary(self) -> str:
        """One line: the verdict and the counts."""
        counts = []
        for severity in _ORDER:
            number = len(self.of(severity))
            plural = "" if number == 1 or severity is Severity.SKIPPED else "s"
            counts.append(f"{number} {severity.value}{plural}")
        verdict = "target and settings fit" if self.draft is None else "target and draft fit"
        if not self.ok:
            verdict = "not ready"
        elif self.of(Severity.SKIPPED):
            verdict = "nothing wrong in what could be checked"
        return f"{verdict}: {', '.join(counts)} ({self.seconds:.1f} s)"


def _plain(part: Any) -> dict[str, Any]:
    """A dataclass as what JSON knows, which has no sets."""

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: sorted(v) if isinstance(v, frozenset) else v for name, v in pairs}

    return dataclasses.asdict(part, dict_factory=as_dict)


def _cell(column: str, value: Any) -> Text:
    from rich.text import Text

    if isinstance(value, int) and column.endswith("bytes"):
        return Text(format_bytes(value))
    return Text(str(value))


def format_bytes(num_bytes: int) -> str:
    """Bytes in the unit that reads best."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
