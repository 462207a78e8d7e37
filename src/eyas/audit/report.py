"""What an audit found, as plain data."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from eyas.audit.modules import Problem

Level = Literal["required", "optional", "context-parallel"]
State = Literal["present", "conditional", "dynamic", "unknown", "stub", "missing"]
Role = Literal["target", "draft", "diffusion", "not generative"]
Verdict = Literal["works", "captures", "captures nothing", "fails", "not followed"]
Kind = Literal["missing", "stub", "dead-setter", "broken-delegation", "unreadable"]

# Kinds in the order of the table: those that look supported and are not come first.
KINDS: tuple[Kind, ...] = ("dead-setter", "broken-delegation", "stub", "missing", "unreadable")


@dataclass(frozen=True)
class Member:
    """One member of an engine's EAGLE-3 interface.

    Attributes:
        level: only a lacking "required" member is a finding.
        is_method: methods can be delegated by a method, attributes by a property.
        sets_layers: the method that says which layers to capture.
    """

    name: str
    level: Level
    meaning: str
    is_method: bool = True
    sets_layers: bool = False


@dataclass(frozen=True)
class MemberState:
    """Whether a class has a member, and where that is written."""

    name: str
    level: Level
    state: State
    location: str = ""
    detail: str = ""


@dataclass(frozen=True)
class InnerClass:
    """A class that the inner model may be, and which required or optional members it has."""

    name: str
    location: str
    has: tuple[str, ...]
    is_full_model: bool  # False: a bare decoder, whose outer class makes the logits


@dataclass(frozen=True)
class InnerModel:
    """The attribute that holds a wrapper's inner model.

    `path` is dotted ("thinker.language_model") where the nearest inner model is a wrapper itself.
    `classes` is empty where the class is chosen by the model's config at load.
    """

    path: str
    location: str
    classes: tuple[InnerClass, ...]


@dataclass(frozen=True)
class Effect:
    """What a method of the interface does when the inner model is of the class `inner`.

    `steps` are the assignments and calls that the verdict rests on, each with its file and line.
    """

    method: str
    inner: str
    verdict: Verdict
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Fix:
    """Source that gives a wrapper a member which its inner model has."""

    member: str
    source: str


@dataclass(frozen=True)
class Finding:
    """Something that will go wrong when this class is served with an EAGLE-3 draft.

    Attributes:
        name: of the class (of the file, where it is unreadable).
        member: of the interface, or "" for a file.
        in_inner: the inner model has what the class lacks.
        accepted: a baseline lists it.
    """

    name: str
    kind: Kind
    member: str
    message: str
    location: str
    in_inner: bool = False
    accepted: bool = False

    @property
    def id(self) -> str:
        """Stable over releases: class, member and kind."""
        return ":".join(part for part in (self.name, self.member, self.kind) if part)


@dataclass(frozen=True)
class ClassReport:
    """One exported class. Only a "target" can have findings.

    Attributes:
        reason: why it has its role.
        bases: the classes that its members come from, in method resolution order.
        fixes: source to add to a wrapper whose inner model has what it lacks.
    """

    name: str
    architectures: tuple[str, ...]
    location: str
    role: Role
    reason: str
    bases: tuple[str, ...] = ()
    members: tuple[MemberState, ...] = ()
    inner: InnerModel | None = None
    effects: tuple[Effect, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    fixes: tuple[Fix, ...] = ()

    def missing(self, level: Level) -> list[str]:
        """Names of the lacking members of a level."""
        return [m.name for m in self.members if m.level == level and m.state == "missing"]

    @property
    def verdict(self) -> Literal["complete", "undecided", "findings"]:
        """ "undecided": no finding, but a required member is out of the audit's sight."""
        if self.findings:
            return "findings"
        required = [m.state for m in self.members if m.level == "required"]
        followed = all(e.verdict != "not followed" for e in self.effects)
        sure = followed and all(state == "present" for state in required)
        return "complete" if sure else "undecided"

    def states(self, *states: State) -> list[MemberState]:
        """The members in one of the given states."""
        return [m for m in self.members if m.state in states]


@dataclass(frozen=True)
class AuditReport:
    """All classes of one release. `resolved` lists a baseline's entries that are gone.

    `protocol` is the declared type that holds the interface, where the engine has one.
    """

    engine: str
    source: str
    version: str | None
    protocol: str
    seconds: float
    interface: tuple[Member, ...]
    classes: tuple[ClassReport, ...]
    problems: tuple[Problem, ...] = ()
    file_findings: tuple[Finding, ...] = ()
    resolved: tuple[str, ...] = field(default=())

    @property
    def targets(self) -> list[ClassReport]:
        """The classes that count: generation models that a draft could speed up."""
        return [c for c in self.classes if c.role == "target"]

    @property
    def findings(self) -> list[Finding]:
        """All findings, accepted ones included."""
        return [f for c in self.classes for f in c.findings] + list(self.file_findings)

    @property
    def open_findings(self) -> list[Finding]:
        """The findings that no baseline accepts."""
        return [f for f in self.findings if not f.accepted]

    def to_dict(self) -> dict[str, Any]:
        """The report for `json.dumps`, without the time it took: equal inputs, equal reports."""
        data = asdict(self)
        del data["seconds"], data["file_findings"]
        findings = sorted(self.findings, key=lambda f: (KINDS.index(f.kind), f.id))
        data["findings"] = [{"id": f.id, **asdict(f)} for f in findings]
        for cls, report in zip(data["classes"], self.classes, strict=True):
            cls["findings"] = [f.id for f in report.findings]
            cls["missing"] = [m.name for m in report.states("missing")]
            cls["verdict"] = report.verdict if report.role == "target" else None
        data["summary"] = {
            "classes": len(self.classes),
            "targets": len(self.targets),
            "complete": sum(c.verdict == "complete" for c in self.targets),
            "undecided": sum(c.verdict == "undecided" for c in self.targets),
            "with_findings": sum(bool(c.findings) for c in self.targets),
            "findings": len(findings),
            "accepted": sum(f.accepted for f in findings),
        }
        return data

    def to_json(self) -> str:
        """The report as JSON text; a later run accepts it as a baseline."""
        return json.dumps(self.to_dict(), indent=2)
