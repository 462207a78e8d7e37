"""What counts as a finding of a class, and what to add to a wrapper."""

from collections.abc import Iterator

from eyas.audit.engines import Engine, Export
from eyas.audit.modules import ClassDefinition
from eyas.audit.report import ClassReport, Finding, Fix, InnerModel, Kind, Member, Verdict
from eyas.audit.wrappers import delegation

FAILURES: tuple[tuple[Verdict, Kind, str], ...] = (
    ("captures nothing", "dead-setter", "captures nothing"),
    ("fails", "broken-delegation", "fails when it is called"),
)


def findings(engine: Engine, report: ClassReport) -> Iterator[Finding]:
    """The findings of a target: required members that lack, are stubs, or do not work."""
    missing = report.missing("required")
    if engine.protocol and missing:
        yield _missing(report, engine.protocol, missing)
    else:
        yield from (_missing(report, name, [name]) for name in missing)
    for member in report.states("stub"):
        if member.level == "required":
            message = f"{member.name} is there in name only: it {member.detail}"
            yield Finding(report.name, "stub", member.name, message, member.location)
    locations = {m.name: m.location for m in report.members if m.state == "present"}
    for verdict, kind, words in FAILURES:
        for method, location in locations.items():
            failing = [e for e in report.effects if (e.method, e.verdict) == (method, verdict)]
            if failing:
                inner = ", ".join(dict.fromkeys(e.inner for e in failing if e.inner))
                steps = list(dict.fromkeys(s for e in failing for s in e.steps))
                message = f"{method} {words}{f' over {inner}' if inner else ''}: {steps[0]}"
                yield Finding(report.name, kind, method, message, location)


def fixes(
    engine: Engine, export: Export, report: ClassReport, interface: tuple[Member, ...]
) -> Iterator[Fix]:
    """Source that gives a wrapper what it lacks and its inner model has.

    Nothing is proposed over a bare decoder: it makes no logits, so that the class around it must
    also unpack in `forward` what the decoder captures.
    """
    inner = report.inner
    if inner is None or not any(f.in_inner for f in report.findings):
        return
    if not any(c.is_full_model for c in inner.classes):
        return
    if whole := engine.fix(export):
        yield Fix(engine.protocol, whole)
        return
    definitions = _definitions(engine, export.definitions[0], inner)
    for member in interface:
        having = {c.location for c in inner.classes if member.name in c.has and c.is_full_model}
        lacks = member.name in report.missing(member.level)
        cls = next((d for d in definitions if d.location in having), None)
        if lacks and cls and member.level != "context-parallel":
            yield Fix(member.name, delegation(engine, cls, inner.path, member))


def _missing(report: ClassReport, member: str, names: list[str]) -> Finding:
    message = f"lacks {member}" + (f" ({', '.join(names)})" if names != [member] else "")
    inner = report.inner
    having = [c for c in inner.classes if set(names) <= set(c.has)] if inner else []
    if inner and having:
        has = ", ".join(c.name for c in having)
        message += f"; its inner model self.{inner.path} ({has}) has it"
        lacking = ", ".join(c.name for c in inner.classes if c not in having)
        message += f", {lacking} has not" if lacking else ""
        if not any(c.is_full_model for c in having):
            message += ", but is a bare decoder: forward must also unpack what it captures"
    return Finding(report.name, "missing", member, message, report.location, in_inner=bool(having))


def _definitions(engine: Engine, cls: ClassDefinition, inner: InnerModel) -> list[ClassDefinition]:
    """The classes that the inner model may be."""
    candidates = [cls]
    for name in inner.path.split("."):
        held = [engine.inner_classes(c).get(name, []) for c in candidates]
        candidates = [instance.cls for instances in held for instance in instances]
    return candidates
