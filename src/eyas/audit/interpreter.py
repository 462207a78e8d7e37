"""A small abstract interpreter: which classes a model's attributes hold, and what a method writes.

It walks syntax trees, follows constructor arguments, `super()`, helper methods and module-level
tables of classes, decides `hasattr` where the classes are known, and takes both branches of every
other condition. Loops run once. What it cannot follow is an `Unknown` value, never a guess.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace

from eyas.audit.classes import ClassTable, Found, Function, decorated
from eyas.audit.evaluator import Arguments, Evaluator, Hook
from eyas.audit.modules import Module, blocks
from eyas.audit.values import (
    NOTHING,
    ClassValue,
    Frame,
    FunctionValue,
    Instance,
    Part,
    SuperValue,
    Trace,
    Unknown,
    Value,
    Values,
    Write,
)

MAX_DEPTH = 12
Receiver = Instance | ClassValue


class Interpreter(Evaluator):
    """Runs functions of one tree on instances of its classes.

    `pinned` narrows an attribute of an instance to some of its values while a method is run.
    """

    def __init__(
        self,
        table: ClassTable,
        *,
        followed: Callable[[Module], bool],
        hooks: Mapping[str, Hook],
    ) -> None:
        super().__init__(table, followed=followed, hooks=hooks)
        self.pinned: dict[tuple[Instance, str], Values] = {}
        self._attributes: dict[Instance, dict[str, Values]] = {}
        self._initializing: set[Instance] = set()
        self._running: list[tuple[ast.AST, Value | None]] = []

    def attributes(self, instance: Instance) -> dict[str, Values]:
        """Attributes that `__init__` sets, with all that each may hold (None left out)."""
        if instance not in self._attributes:
            self._attributes[instance] = {}  # filled while __init__ runs, which reads it too
            found = self.table.find(instance.cls, "__init__")
            method = self._bind(found, instance) if found else None
            if isinstance(method, FunctionValue):
                self._initializing.add(instance)
                outside, self.uncertain = self.uncertain, 0
                self.run(method, dict(instance.arguments))
                self.uncertain = outside
                self._initializing.remove(instance)
        return self._attributes[instance]

    def attribute(self, owner: Value, name: str) -> Values | None:
        """From `pinned`, what `__init__` set, the class, or any other method that sets it."""
        if isinstance(owner, SuperValue):
            cls = owner.receiver.cls
            found = self.table.find(cls, name, after=owner.owner)
            return self._member(found, owner.receiver) if found else None
        if isinstance(owner, ClassValue):
            found = self.table.find(owner.cls, name)
            return self._member(found, owner) if found else None
        if not isinstance(owner, Instance):
            return None
        if (owner, name) in self.pinned:
            return self.pinned[owner, name]
        if name in (attributes := self.attributes(owner)):
            followed = Instance | ClassValue | FunctionValue
            values = attributes[name]
            sure = values and all(isinstance(v, followed) for v in values)
            return values if sure else values | {Part(owner)}
        if found := self.table.find(owner.cls, name):
            return self._member(found, owner)
        return frozenset({Part(owner)}) if self.table.find_store(owner.cls, name) else None

    def has(self, instance: Instance, name: str) -> bool | None:
        """None where `__getattr__` or a base outside the tree decides."""
        if name in self.attributes(instance) or self.table.find(instance.cls, name):
            return True
        if self.table.find_store(instance.cls, name):
            return True
        if self.table.dynamic(instance.cls):
            return None
        return {"yes": True, "no": False, "unknown": None}[self.table.outside(instance.cls, name)]

    def write(self, frame: Frame, write: Write, values: Values) -> None:
        """Adds the write to the trace, and to the attributes of what is being initialized."""
        frame.trace.writes.append(write)
        direct = not write.on_part and not write.in_place
        if direct and write.owner in self._initializing:
            known = self._attributes[write.owner]
            before = known.get(write.attribute, NOTHING) if self.uncertain else NOTHING
            known[write.attribute] = before | values

    def constant(self, module: Module, expression: ast.expr) -> Values:
        """Evaluates the expression in the module's own scope; a cycle has no value."""
        if (expression, None) in self._running or len(self._running) > MAX_DEPTH:
            return NOTHING
        self._running.append((expression, None))
        try:
            return self.evaluate(expression, Frame(module))
        finally:
            self._running.pop()

    def method(self, instance: Instance, name: str) -> FunctionValue | None:
        """The method that `instance.name` is, aliases included, where it is one of the tree."""
        for value in self.attribute(instance, name) or ():
            if isinstance(value, FunctionValue):
                bound = isinstance(value.receiver, Instance)
                return value if bound else replace(value, receiver=instance)
        return None

    def run(self, function: FunctionValue, arguments: Arguments) -> Trace:
        """Runs the body once; a recursive call is left out and noted as not followed."""
        key = (function.node, function.receiver)
        if key in self._running or len(self._running) > MAX_DEPTH:
            return Trace(unfollowed=[f"{function.node.name}(): too deep"])
        frame = Frame(function.module, function.owner, function.receiver)
        self._bind_parameters(function, arguments, frame)
        self._running.append(key)
        try:
            self._execute(function.node.body, frame)
        finally:
            self._running.pop()
        return frame.trace

    def _bind_parameters(self, function: FunctionValue, given: Arguments, frame: Frame) -> None:
        spec = function.node.args
        positional = [*spec.posonlyargs, *spec.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults))
        pairs = [
            *zip(positional, [*defaults, *spec.defaults], strict=True),
            *zip(spec.kwonlyargs, spec.kw_defaults, strict=True),
        ]
        for parameter, default in pairs:
            name = parameter.arg
            unset = frozenset({Unknown(f"parameter {name}")})
            if name in given:
                frame.variables[name] = given[name]
            else:
                known = self.evaluate(default, Frame(function.module)) if default else NOTHING
                frame.variables[name] = known or unset
        if function.receiver is not None and positional:
            frame.variables[positional[0].arg] = frozenset({function.receiver})

    def _execute(self, body: list[ast.stmt], frame: Frame) -> bool:
        """Runs statements; whether the function is sure to have ended (return or raise)."""
        return any(self._statement(node, frame) for node in body)

    def _statement(self, node: ast.stmt, frame: Frame) -> bool:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self.assign(target, node.value, frame)
            case ast.AnnAssign(value=ast.expr()) | ast.AugAssign():
                if node.value is not None:
                    self.assign(node.target, node.value, frame)
            case ast.Expr():
                self.evaluate(node.value, frame)
            case ast.Return():
                frame.trace.returns |= self.evaluate(node.value, frame) if node.value else NOTHING
                return True
            case ast.Raise():
                frame.trace.raises = not frame.may_have_ended
                return True
            case ast.If():
                return self._branch(node, frame)
            case ast.For() | ast.AsyncFor():
                self.bind_loop(node.target, node.iter, frame)
                self._maybe([*node.body, *node.orelse], frame)
            case ast.Import() | ast.ImportFrom():
                self.import_names(node, frame)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    if isinstance(item.optional_vars, ast.Name):
                        self.assign(item.optional_vars, item.context_expr, frame)
                return self._execute(node.body, frame)
            case ast.While() | ast.Match():
                for block in blocks(node):
                    self._maybe(block, frame)
            case ast.Try():
                lacked = len(frame.trace.missing)
                for block in blocks(node):
                    self._maybe(block, frame)
                if node.handlers:  # which may be there for just that
                    del frame.trace.missing[lacked:]
        return False

    def _branch(self, node: ast.If, frame: Frame) -> bool:
        self.evaluate(node.test, frame)
        verdict = self.truth(node.test, frame)
        if verdict is not None:
            return self._execute(node.body if verdict else node.orelse, frame)
        before = dict(frame.variables)
        ended = self._maybe(node.body, frame)
        after, frame.variables = frame.variables, before
        ended_too = self._maybe(node.orelse, frame)
        if not ended:
            self._join(frame, after)
        return ended and ended_too

    def _maybe(self, body: list[ast.stmt], frame: Frame) -> bool:
        """Runs statements that may not be reached: a `raise` in them is not certain."""
        before = frame.trace.raises
        self.uncertain += 1
        ended = self._execute(body, frame)
        self.uncertain -= 1
        frame.trace.raises = before
        frame.may_have_ended |= ended
        return ended

    @staticmethod
    def _join(frame: Frame, other: dict[str, Values]) -> None:
        for name, values in other.items():
            frame.variables[name] = frame.variables.get(name, NOTHING) | values

    def _member(self, found: Found, receiver: Receiver) -> Values:
        """A class-level member seen through an object: methods bound, properties read."""
        value = self._bind(found, receiver)
        if isinstance(value, FunctionValue) and isinstance(receiver, Instance):
            if decorated(value.node, "property") or decorated(value.node, "cached_property"):
                return frozenset(self.run(value, {}).returns) or frozenset({Part(receiver)})
        if value is not None:
            return frozenset({value})
        if isinstance(found.node, ast.expr):
            return self.constant(found.owner.module, found.node)
        return frozenset({Unknown(found.location)})

    def _bind(self, found: Found, receiver: Receiver) -> Value | None:
        node, module = found.node, found.owner.module
        if isinstance(node, Function):
            if decorated(node, "staticmethod"):
                return FunctionValue(module, node, found.owner)
            if decorated(node, "classmethod"):
                return FunctionValue(module, node, found.owner, ClassValue(receiver.cls))
            return FunctionValue(module, node, found.owner, receiver)
        if isinstance(node, ast.ClassDef):
            return ClassValue(self.table.index.class_of(module, node))
        return None
