"""Does the setter of the captured layers reach anything? A method may exist and capture nothing.

The setter is run abstractly for each inner model: it must end in an attribute that code reachable
from that model's `forward` reads.
"""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

from eyas.audit.classes import ClassTable, Function
from eyas.audit.engines import Engine
from eyas.audit.modules import ClassDefinition, FunctionDefinition, Module
from eyas.audit.report import Effect, InnerModel, Member, Verdict
from eyas.audit.values import Instance, Trace, Write


@dataclass
class Seen:
    """What the code that a class's `forward` reaches reads: name → file and line."""

    names: dict[str, str] = field(default_factory=dict)
    complete: bool = True  # False: the object is handed to code that is not in the tree


@dataclass(frozen=True)
class _Code:
    """A function that is reached, as a method of a class or on its own."""

    module: Module
    owner: ClassDefinition | None
    node: Function


class Reads:
    """Attribute names that a class reads in the code that its `forward` reaches."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.table: ClassTable = engine.table
        self._known: dict[ClassDefinition, Seen] = {}

    def of(self, cls: ClassDefinition) -> Seen:
        """What is read; nothing, and not complete, where the forward is not in the tree."""
        if cls not in self._known:
            roots = [n for c in self.table.mro(cls) for n in self.table.members(c) if _is_root(n)]
            found = (self.table.find(cls, n) for n in dict.fromkeys(roots))
            code = [_Code(f.owner.module, f.owner, f.node) for f in found if f and _is_code(f.node)]
            outside = not code and self.table.outside(cls, "forward") != "no"
            self._known[cls] = Seen(complete=False) if outside else self._walk(cls, code)
        return self._known[cls]

    def _walk(self, cls: ClassDefinition, pending: list[_Code]) -> Seen:
        seen, visited = Seen(), set()
        while pending:
            code = pending.pop()
            if code.node in visited:
                continue
            visited.add(code.node)
            for node in ast.walk(code.node):
                for name in _names_read(node):
                    place = f"{code.module.file}:{getattr(node, 'lineno', 0)}"
                    seen.names.setdefault(name, place)
                pending += self._methods(cls, code, node)
                if isinstance(node, ast.Call):
                    functions = self._functions(code, node)
                    pending += functions
                    if _passes_first(code.node, node) and not functions:
                        seen.complete = False
        return seen

    def _methods(self, cls: ClassDefinition, code: _Code, node: ast.AST) -> Iterator[_Code]:
        """A method of the class that a node names, whatever it is named on."""
        match node:
            case ast.Attribute(value=ast.Name()) if code.owner:
                found = self.table.find(cls, node.attr)
            case ast.Attribute(value=ast.Call(func=ast.Name("super"))) if code.owner:
                found = self.table.find(cls, node.attr, after=code.owner)
            case _:
                return
        if found and isinstance(found.node, Function):
            yield _Code(found.owner.module, found.owner, found.node)

    def _functions(self, code: _Code, call: ast.Call) -> list[_Code]:
        """Functions that a call enters: of the models, or whichever the object is handed to."""
        if not isinstance(call.func, ast.Name | ast.Attribute):
            return []
        symbols = self.table.resolve(code.module, call.func)
        functions = [s for s in symbols if isinstance(s, FunctionDefinition)]
        if not _passes_first(code.node, call):
            functions = [f for f in functions if self.engine.is_model_module(f.module)]
        return [_Code(f.module, None, f.node) for f in functions]


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
    found = reads.table.find(write.owner.cls, write.attribute)
    if found and isinstance(found.node, Function):
        return None  # a property: its setter may do anything
    seen = reads.of(write.owner.cls)
    # A part of another class, such as a layer, may read the attribute itself.
    unseen = write.on_part or not seen.complete
    return seen.names.get(write.attribute, None if unseen else "")


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


def _is_code(node: ast.AST) -> TypeGuard[Function]:
    return isinstance(node, Function)


def _passes_first(function: Function, call: ast.Call) -> bool:
    """Whether a call hands on the function's first parameter, the object itself in a method."""
    first = next(iter([*function.args.posonlyargs, *function.args.args]), None)
    if first is None or (isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)):
        return False
    handed = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(isinstance(a, ast.Name) and a.id == first.arg for a in handed)


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
