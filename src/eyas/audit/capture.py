"""Does the setter of the captured layers reach anything? A method may exist and capture nothing.

The setter is run abstractly for each inner model: it must end in an attribute that code reachable
from that model's `forward` reads.
"""

import ast
from collections.abc import Iterator

from eyas.audit.classes import ClassTable, Function
from eyas.audit.engines import Engine
from eyas.audit.modules import ClassDefinition, FunctionDefinition, Module
from eyas.audit.report import Effect, InnerModel, Member, Verdict
from eyas.audit.values import Instance, Trace, Write


class Reads:
    """Attribute names that a class reads in the code that its `forward` reaches."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.table: ClassTable = engine.table
        self._known: dict[ClassDefinition, dict[str, str] | None] = {}

    def of(self, cls: ClassDefinition) -> dict[str, str] | None:
        """Name → where it is read; None where the class's forward is not in the tree."""
        if cls not in self._known:
            roots = [n for c in self.table.mro(cls) for n in self.table.members(c) if _is_root(n)]
            reached = [f for n in dict.fromkeys(roots) if (f := self.table.find(cls, n))]
            functions = [(f.owner, f.node) for f in reached if isinstance(f.node, Function)]
            known = functions or self.table.outside(cls, "forward") == "no"
            self._known[cls] = self._walk(cls, functions) if known else None
        return self._known[cls]

    def _walk(
        self, cls: ClassDefinition, roots: list[tuple[ClassDefinition, Function]]
    ) -> dict[str, str]:
        names: dict[str, str] = {}
        pending: list[tuple[Module, ClassDefinition | None, Function]] = [
            (owner.module, owner, node) for owner, node in roots
        ]
        seen: set[Function] = set()
        while pending:
            module, owner, function = pending.pop()
            if function in seen:
                continue
            seen.add(function)
            for node in ast.walk(function):
                for name in _names_read(node):
                    names.setdefault(name, f"{module.file}:{getattr(node, 'lineno', 0)}")
                pending += self._reached(cls, module, owner, node)
        return names

    def _reached(
        self, cls: ClassDefinition, module: Module, owner: ClassDefinition | None, node: ast.AST
    ) -> Iterator[tuple[Module, ClassDefinition | None, Function]]:
        """Methods and functions that a node leads to."""
        match node:
            case ast.Attribute(value=ast.Name()) if owner:
                found = self.table.find(cls, node.attr)
            case ast.Attribute(value=ast.Call(func=ast.Name("super"))) if owner:
                found = self.table.find(cls, node.attr, after=owner)
            case ast.Call(func=ast.Name(name)):
                for symbol in self.table.index.resolve(module, name):
                    if isinstance(symbol, FunctionDefinition) and self.engine.is_model_module(
                        symbol.module
                    ):
                        yield symbol.module, None, symbol.node
                return
            case _:
                return
        if found and isinstance(found.node, Function):
            yield found.owner.module, found.owner, found.node


def effects(
    engine: Engine, reads: Reads, cls: ClassDefinition, member: Member, inner: InnerModel | None
) -> Iterator[Effect]:
    """What a method of the interface does on an instance of `cls`, by class of its inner model.

    Of the setter, whether the layers reach anything; of other methods, whether what they call of
    the interface is there.
    """
    instance = Instance(cls)
    interpreter = engine.interpreter
    method = interpreter.method(instance, member.name)
    if method is None:
        return
    attribute = _attribute_acted_on(engine, cls, method.node, inner)
    alternatives: list[Instance | None] = [*engine.inner_classes(cls).get(attribute, [])]
    for alternative in alternatives or [None]:
        if alternative is not None:
            interpreter.pinned = {(instance, attribute): frozenset({alternative})}
        trace = interpreter.run(method, {})
        interpreter.pinned = {}
        verdict, steps = _verdict(reads, instance, trace, member)
        name = alternative.cls.name if alternative else ""
        yield Effect(member.name, name, verdict, tuple(sorted(set(steps))))


def _attribute_acted_on(
    engine: Engine, cls: ClassDefinition, method: Function, inner: InnerModel | None
) -> str:
    """The attribute that holds the model which a method acts on."""
    named = [n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute)]
    held = [name for name in named if name in engine.inner_classes(cls)]
    preferred = inner.path.split(".")[0] if inner else ""
    return preferred if preferred in held or not held else held[0]


def _verdict(
    reads: Reads, outer: Instance, trace: Trace, member: Member
) -> tuple[Verdict, list[str]]:
    if trace.raises:
        return "fails", ["always raises"]
    verdict, steps = _capture(reads, outer, trace) if member.sets_layers else ("works", [])
    missing = [m for m in trace.missing if m.method == member.name or _is_capture_name(m.method)]
    # A call in a branch that may not be taken counts where nothing else works either.
    if any(m.certain for m in missing) or (missing and verdict == "captures nothing"):
        calls = [(m.location, m.method, m.receiver.cls.name) for m in missing]
        return "fails", [f"{place}: calls {name}, which {cls} lacks" for place, name, cls in calls]
    return verdict, steps


def _capture(reads: Reads, outer: Instance, trace: Trace) -> tuple[Verdict, list[str]]:
    writes = [w for w in trace.writes if not w.constant or w.on_part]
    writes = [w for w in writes if w.owner != outer] or writes
    readers = [_reader(reads, w) for w in writes]
    steps = [_describe_write(w, r) for w, r in zip(writes, readers, strict=True)]
    if any(readers):
        return "captures", steps
    if trace.unfollowed or None in readers:
        return "not followed", steps + [f"not followed: {what}" for what in trace.unfollowed]
    return "captures nothing", steps or ["writes nothing"]


def _reader(reads: Reads, write: Write) -> str | None:
    """Where the written attribute is read: "" for nowhere, None where the audit cannot tell."""
    names = reads.of(write.owner.cls)
    if names is None:
        return None
    found = reads.table.find(write.owner.cls, write.attribute)
    if found and isinstance(found.node, Function):
        return None  # a property: its setter may do anything
    # A part of another class, such as a layer, may read the attribute itself.
    return names.get(write.attribute, None if write.on_part else "")


def _describe_write(write: Write, reader: str | None) -> str:
    where = f"a part of {write.owner.cls.name}" if write.on_part else write.owner.cls.name
    read = f"read at {reader}" if reader else "never read by its forward"
    if reader is None:
        read = "read or not, that is out of sight"
    return f"{write.location}: sets {write.attribute} of {where}; {read}"


def _is_capture_name(name: str) -> bool:
    return "layers_to_capture" in name or "aux_hidden_state" in name


def _is_root(name: str) -> bool:
    return name.startswith("forward") or name == "__call__"


def _names_read(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"getattr", "hasattr"}
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    ):
        yield str(node.args[1].value)
