"""The report for a reader: a table of all classes, or the whole account of one."""

import difflib
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.audit.errors import AuditError
from eyas.audit.report import KINDS, AuditReport, ClassReport, Finding, MemberState

PIPED_WIDTH = 160  # a log has no edge to fold at
WIDE = 120  # columns from which on the optional members are shown
STATE_STYLES = {"yes": "green", "missing": "red", "undecided": "yellow"}
KIND_WORDS = {
    "missing": "missing",
    "stub": "a stub",
    "dead-setter": "captures nothing",
    "broken-delegation": "fails",
}


def render_table(report: AuditReport, console: Console) -> None:
    """Prints the classes with open findings or undecided members, what to add, and the totals."""
    width = console.width
    if not console.is_terminal:
        console.width = max(width, PIPED_WIDTH)
    try:
        shown = [c for c in report.targets if _is_shown(c)]
        rows = [c for c in shown if not _has_nothing(c)]
        if rows:
            rows.sort(key=_urgency)
            console.print(_table(report, rows, width=console.width))
        for line in _below_the_table(report, shown):
            console.print(Text(line))
    finally:
        console.width = width


def find_class(report: AuditReport, name: str) -> list[ClassReport]:
    """The exported classes of that name, or that serve the architecture of that name.

    Raises:
        AuditError: there is none; the text suggests near names.
    """
    found = [c for c in report.classes if c.name == name]
    found = found or [c for c in report.classes if name in c.architectures]
    if found:
        return found
    names = {n.lower(): n for c in report.classes for n in (*c.architectures, c.name)}
    near = [n for n in sorted(names) if name.lower() in n][:5]
    near = near or difflib.get_close_matches(name.lower(), names, n=3)
    hint = f"; did you mean {', '.join(names[n] for n in near)}?" if near else ""
    raise AuditError(f"{report.engine} exports no class {name}{hint}")


def explain(report: AuditReport, class_name: str) -> str:
    """All about one exported class, with file and line; raises AuditError for an unknown name."""
    found = find_class(report, class_name)
    return "\n\n".join("\n".join(_explanation(report, c)) for c in found)


def _is_shown(cls: ClassReport) -> bool:
    return cls.verdict == "undecided" or any(not f.accepted for f in cls.findings)


def _has_nothing(cls: ClassReport) -> bool:
    """Whether it is a model without any EAGLE-3 support, its inner model included."""
    states = {m.state for m in cls.members if m.level == "required"}
    by_config = cls.inner is not None and not cls.inner.classes
    return states == {"missing"} and not by_config and not any(f.in_inner for f in cls.findings)


def _urgency(cls: ClassReport) -> tuple[int, bool, str]:
    """Classes that look supported and are not come first, then wrapper gaps, then the rest."""
    worst = min((KINDS.index(f.kind) for f in cls.findings), default=len(KINDS))
    return worst, not any(f.in_inner for f in cls.findings), cls.name


def _table(report: AuditReport, classes: list[ClassReport], *, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("class, inner model", min_width=max(len(c.name) for c in classes))
    required = [m.name for m in report.interface if m.level == "required"]
    columns = [report.protocol] if report.protocol else required
    for name in columns:
        table.add_column(name, overflow="fold")
    optional = {m.name for m in report.interface if m.level == "optional" and m.is_method}
    has_room = width >= WIDE and bool(optional)
    if has_room:
        table.add_column("optional methods missing")
    for cls in classes:
        cells = [_cell(cls, [n, *required] if report.protocol else [n]) for n in columns]
        lacking = [n for n in cls.missing("optional") if n in optional]
        rest = [", ".join(lacking) or "-"] if has_room else []
        table.add_row(_name(cls), *cells, *rest)
    return table


def _cell(cls: ClassReport, names: list[str]) -> Text:
    for finding in cls.findings:
        if finding.member in names:
            words = KIND_WORDS[finding.kind]
            words = "inner model only" if finding.in_inner else words
            words += " (accepted)" if finding.accepted else ""
            return Text(words, STATE_STYLES["missing"])
    states = {m.state for m in cls.members if m.name in names}
    if states != {"present"}:
        return Text(", ".join(sorted(states - {"present"})), STATE_STYLES["undecided"])
    if any(e.method in names and e.verdict == "not followed" for e in cls.effects):
        return Text("not followed", STATE_STYLES["undecided"])
    return Text("yes", STATE_STYLES["yes"])


def _name(cls: ClassReport) -> Text:
    name = Text(cls.name)
    if cls.inner:
        first, *others = [c.name for c in cls.inner.classes] or ["not named in the source"]
        more = f" and {len(others)} more" if others else ""
        name.append(f"\n  {cls.inner.path}: {first}{more}", "dim")
    return name


def _below_the_table(report: AuditReport, shown: list[ClassReport]) -> Iterator[str]:
    broken = [f for c in shown for f in c.findings if f.kind != "missing" and not f.accepted]
    if broken:
        yield "There, and yet it does not work:"
        yield from (f"  {f.name}: {f.message}" for f in broken)
        yield ""
    nothing = [c.name for c in shown if _has_nothing(c)]
    if nothing:
        yield f"Without any of the interface, in an inner model either ({len(nothing)}):"
        yield f"{', '.join(nothing)}\n"
    yield from _to_add(report, shown)
    notes = dict.fromkeys(note for c in report.targets for note in c.notes)
    if notes:
        yield "Notes:"
        yield from (f"  {note}" for note in notes)
        yield ""
    problems = [f for f in report.file_findings if not f.accepted]
    if problems:
        yield "Not readable, so that what it holds is missing above:"
        yield from (f"  {f.location}: {f.message}" for f in problems)
        yield ""
    if report.resolved:
        yield "In the baseline, but findings no more:"
        yield from (f"  {entry}" for entry in report.resolved)
        yield ""
    yield _totals(report)


def _to_add(report: AuditReport, shown: list[ClassReport]) -> Iterator[str]:
    """The delegating methods, each text once with all classes that lack it."""
    required = {m.name for m in report.interface if m.level == "required"} | {report.protocol}
    receivers: dict[str, list[str]] = {}
    for cls in shown:
        sources = [f.source for f in cls.fixes if f.member in required]
        if sources:
            receivers.setdefault("\n\n".join(sources), []).append(cls.name)
    if receivers:
        yield "To add where the inner model has it (--class NAME prints optional members too):\n"
    for source, names in receivers.items():
        yield f"{', '.join(names)}:\n{source}\n"


def _totals(report: AuditReport) -> str:
    count = report.to_dict()["summary"]
    accepted = f", {count['accepted']} of them accepted" if count["accepted"] else ""
    return (
        f"{report.engine} {report.version or '(version unknown)'}: {count['classes']} exported "
        f"classes, {count['targets']} of them generation models: {count['complete']} complete, "
        f"{count['undecided']} undecided, {count['with_findings']} with findings "
        f"({count['findings']} findings{accepted}). {report.seconds:.1f} s."
    )


def _explanation(report: AuditReport, cls: ClassReport) -> Iterator[str]:
    release = f"{report.engine} {report.version or ''}".strip()
    yield f"{cls.name} ({release}), {cls.location}"
    yield f"  {cls.role}: {cls.reason}"
    if cls.architectures != (cls.name,):
        yield f"  serves {', '.join(cls.architectures)}"
    if len(cls.bases) > 1:
        yield "  inherits from"
        yield from (f"    {base}" for base in cls.bases[1:])
    if cls.inner:
        yield f"  inner model self.{cls.inner.path}, set at {cls.inner.location}"
        for inner in cls.inner.classes:
            kind = "" if inner.is_full_model else ", a bare decoder,"
            yield f"    {inner.name} {inner.location}{kind} has {', '.join(inner.has) or 'none'}"
        if not cls.inner.classes:
            yield "    its class is not in the source: the config names it, or another package"
    yield "  members"
    width = max(len(m.name) for m in cls.members)
    yield from (f"    {m.name:{width}} {_member(m)}" for m in cls.members)
    for effect in cls.effects:
        if effect.steps:
            over = f" over {effect.inner}" if effect.inner else ""
            yield f"  {effect.method}{over}: {effect.verdict}"
            yield from (f"    {step}" for step in effect.steps)
    yield from (f"  note: {note}" for note in cls.notes)
    yield from (f"  FINDING {_finding(f)}" for f in cls.findings)
    if cls.role == "target" and not cls.findings:
        yield f"  no finding ({cls.verdict})"
    if cls.fixes:
        yield "  to add:\n"
        yield "\n\n".join(f.source for f in cls.fixes)


def _member(member: MemberState) -> str:
    where = f" {member.location}" if member.location else ""
    detail = f", {member.detail}" if member.detail else ""
    return f"{member.state:11} {member.level}{where}{detail}"


def _finding(finding: Finding) -> str:
    accepted = " (accepted by the baseline)" if finding.accepted else ""
    return f"{finding.id}{accepted}\n    {finding.message}"
