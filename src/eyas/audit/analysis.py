"""The audit itself: opens a release, looks at every exported class, and collects the findings."""

import gc
import os
import time
from collections.abc import Iterator
from dataclasses import replace

from eyas.audit.capture import Reads, effects
from eyas.audit.engines import Engine, Export
from eyas.audit.errors import AuditError
from eyas.audit.findings import findings, fixes
from eyas.audit.members import inner_model, member_state
from eyas.audit.report import AuditReport, ClassReport, Effect, Finding, InnerModel, Member
from eyas.audit.sglang import SGLang
from eyas.audit.source import open_source
from eyas.audit.vllm import VLLM

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (SGLang, VLLM)}


def audit(path: str | os.PathLike[str], engine: str) -> AuditReport:
    """Reads another engine's sources and reports what its models lack for EAGLE-3.

    Args:
        path: a source tree, wheel or sdist of the engine; nothing of it is imported or run.
        engine: "sglang" or "vllm".

    Raises:
        AuditError: unknown engine, or a path that does not hold its sources.
    """
    start = time.perf_counter()
    kind = ENGINES.get(engine)
    if kind is None:
        raise AuditError(f"unknown engine {engine!r}; this version reads {', '.join(ENGINES)}")
    opened = kind(open_source(path, package=kind.package, models=kind.models))
    collecting = gc.isenabled()
    gc.disable()  # millions of syntax nodes, none of them garbage: collecting doubles the time
    try:
        interface = opened.interface()
        auditor = _Auditor(opened, interface)
        classes = tuple(auditor.report(export) for export in opened.exports())
    finally:
        opened.close()
        if collecting:
            gc.enable()
    problems = (*opened.index.problems.values(), *opened.unresolved)
    unreadable = tuple(
        Finding(p.file, "unreadable", "", p.message, f"{p.file}:{p.line}") for p in problems
    )
    return AuditReport(
        engine=engine,
        source=str(path),
        version=opened.index.tree.version,
        protocol=kind.protocol,
        seconds=time.perf_counter() - start,
        interface=interface,
        classes=classes,
        problems=problems,
        file_findings=unreadable,
    )


class _Auditor:
    """Looks at one class after another."""

    def __init__(self, engine: Engine, interface: tuple[Member, ...]) -> None:
        self.engine = engine
        self.interface = interface
        self.reads = Reads(engine)

    def report(self, export: Export) -> ClassReport:
        """All about one exported class."""
        engine = self.engine
        cls = export.definitions[0]
        role, reason = engine.role(export)
        inner = inner_model(engine, cls, self.interface)
        report = ClassReport(
            name=export.name,
            architectures=export.architectures,
            location=cls.location,
            role=role,
            reason=reason,
            bases=tuple(f"{c.name} {c.location}" for c in engine.table.mro(cls)),
            members=tuple(member_state(engine, export, m) for m in self.interface),
            inner=inner,
            effects=tuple(dict.fromkeys(self._effects(export, inner))),
            notes=tuple(dict.fromkeys(n for c in export.definitions for n in engine.notes(c))),
        )
        if role != "target":
            return report
        report = replace(report, findings=tuple(findings(engine, report)))
        return replace(report, fixes=tuple(fixes(engine, export, report, self.interface)))

    def _effects(self, export: Export, inner: InnerModel | None) -> Iterator[Effect]:
        for member in self.interface:
            if member.level == "required" and member.is_method:
                for cls in export.definitions:
                    yield from effects(self.engine, self.reads, cls, member, inner)
