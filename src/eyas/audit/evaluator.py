"""Expressions of the audited source: what they may evaluate to."""

import ast
import builtins
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from eyas.audit.classes import ClassTable, Function, decorated
from eyas.audit.modules import (
    ClassDefinition,
    External,
    FunctionDefinition,
    Module,
    NamedValue,
    Symbol,
    import_bindings,
    is_type_checking,
)
from eyas.audit.values import (
    NOTHING,
    ClassValue,
    Collection,
    Frame,
    FunctionValue,
    Instance,
    MissingCall,
    ModuleValue,
    Part,
    SuperValue,
    Text,
    Trace,
    Unknown,
    Value,
    Values,
    Write,
    elements,
)

Arguments = dict[str, Values]
# Builtins and methods that hand back (an element of) what they are given.
PASSING = frozenset({"cast", "list", "tuple", "reversed", "sorted", "set", "iter", "enumerate"})
SELF_RETURNING = frozenset({"to", "eval", "train", "cuda", "half", "bfloat16", "float", "type"})
MUTATING = frozenset({"append", "extend", "insert", "add", "update", "clear", "setdefault"})


# Replaces a function that the engine resolves at run time; None: follow the function itself.
Hook = Callable[[FunctionValue, Arguments], Values | None]


class Evaluator(ABC):
    """Evaluates expressions in a frame; how objects behave is left to the subclass."""

    def __init__(
        self,
        table: ClassTable,
        *,
        followed: Callable[[Module], bool],
        hooks: Mapping[str, Hook],
    ) -> None:
        self.table = table
        self.followed = followed
        self.hooks = hooks
        self.uncertain = 0  # nested branches that may not be taken

    @abstractmethod
    def attribute(self, owner: Value, name: str) -> Values | None:
        """What `owner.name` may be; None where there is no such attribute."""

    @abstractmethod
    def has(self, instance: Instance, name: str) -> bool | None:
        """`hasattr(instance, name)`; None where the audit cannot tell."""

    @abstractmethod
    def run(self, function: FunctionValue, arguments: Arguments) -> Trace:
        """Runs a function of the tree."""

    @abstractmethod
    def constant(self, module: Module, expression: ast.expr) -> Values:
        """The value of a module-level expression."""

    @abstractmethod
    def write(self, frame: Frame, write: Write, values: Values) -> None:
        """Notes an assignment to an attribute."""

    def evaluate(self, node: ast.expr, frame: Frame) -> Values:
        """All that the expression may be. None, numbers and the like are left out."""
        match node:
            case ast.Name():
                return self._name(node.id, frame)
            case ast.Attribute():
                return self._attribute(self.evaluate(node.value, frame), node.attr)
            case ast.Call():
                return self._call(node, frame)
            case ast.IfExp():
                return self._choice(node, frame)
            case ast.BoolOp():
                return self._union(node.values, frame)
            case ast.NamedExpr():
                frame.variables[node.target.id] = self.evaluate(node.value, frame)
                return frame.variables[node.target.id]
            case ast.Dict():
                return frozenset({Collection(self._union(node.values, frame))})
            case ast.List() | ast.Tuple() | ast.Set():
                return frozenset({Collection(self._union(node.elts, frame))})
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                for generator in node.generators:
                    self.bind_loop(generator.target, generator.iter, frame)
                return frozenset({Collection(self.evaluate(node.elt, frame))})
            case ast.Subscript():
                return elements(self.evaluate(node.value, frame))
            case ast.Starred() | ast.Await():
                return self.evaluate(node.value, frame)
            case ast.Constant(value=str(text)):
                return frozenset({Text(text)})
        return NOTHING

    def truth(self, test: ast.expr, frame: Frame) -> bool | None:
        """What a condition is known to be: `hasattr` on classes of the tree, or constants."""
        match test:
            case ast.Constant():
                return bool(test.value)
            case ast.UnaryOp(op=ast.Not()):
                inner = self.truth(test.operand, frame)
                return None if inner is None else not inner
            case ast.BoolOp():
                deciding = isinstance(test.op, ast.Or)
                verdicts = [self.truth(v, frame) for v in test.values]
                if deciding in verdicts:
                    return deciding
                return None if None in verdicts else not deciding
            case ast.Call(func=ast.Name("hasattr"), args=[owner, ast.Constant(value=str(name))]):
                values = self.evaluate(owner, frame)
                answers = {self.has(v, name) if isinstance(v, Instance) else None for v in values}
                return answers.pop() if len(answers) == 1 else None
            case ast.Call(func=ast.Name("isinstance"), args=[owner, kinds]):
                values, classes = self.evaluate(owner, frame), self.evaluate(kinds, frame)
                classes |= elements(classes)
                answers = {self._is_instance(v, classes) for v in values}
                return answers.pop() if len(answers) == 1 else None
        return False if is_type_checking(test) else None

    def bind_loop(self, target: ast.expr, iterable: ast.expr, frame: Frame) -> None:
        """Gives a loop's variables all that the iterable (or a zip's several) may hold."""
        sources = [iterable]
        if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name):
            if iterable.func.id in {"zip", "enumerate"}:
                sources = iterable.args
        values = elements(self._union(sources, frame))
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                frame.variables[node.id] = values

    def import_names(self, node: ast.Import | ast.ImportFrom, frame: Frame) -> None:
        """An import statement inside a function."""
        for name, binding in import_bindings(frame.module, node):
            symbols = self.table.index.import_symbols(binding.target, binding.attribute)
            frame.variables[name] = frozenset().union(*map(self._symbol, symbols))

    def match_arguments(
        self, call: ast.Call, function: Function, frame: Frame, *, skip: int
    ) -> Arguments:
        """Values by parameter name, without the first `skip` parameters."""
        parameters = [*function.args.posonlyargs, *function.args.args][skip:]
        arguments: Arguments = {}
        for parameter, value in zip(parameters, call.args, strict=False):
            if isinstance(value, ast.Starred):
                break
            arguments[parameter.arg] = self.evaluate(value, frame)
        for keyword in call.keywords:
            if keyword.arg:
                arguments[keyword.arg] = self.evaluate(keyword.value, frame)
        return arguments

    def _choice(self, node: ast.IfExp, frame: Frame) -> Values:
        verdict = self.truth(node.test, frame)
        if verdict is not None:
            return self.evaluate(node.body if verdict else node.orelse, frame)
        self.uncertain += 1
        values = self._union([node.body, node.orelse], frame)
        self.uncertain -= 1
        return values

    def _is_instance(self, value: Value, classes: Values) -> bool | None:
        if not isinstance(value, Instance):
            return None
        order = self.table.mro(value.cls)
        if any(isinstance(c, ClassValue) and c.cls in order for c in classes):
            return True
        known = all(isinstance(c, ClassValue | Collection) for c in classes)
        open_ended = any(e.reason for e in self.table.externals(value.cls))
        return False if known and classes and not open_ended else None

    def _union(self, nodes: list[ast.expr] | list[ast.expr | None], frame: Frame) -> Values:
        return NOTHING.union(*(self.evaluate(n, frame) for n in nodes if n is not None))

    def _name(self, name: str, frame: Frame) -> Values:
        if name in frame.variables:
            return frame.variables[name]
        symbols = self.table.index.resolve(frame.module, name)
        return NOTHING.union(*map(self._symbol, symbols))

    def _symbol(self, symbol: Symbol) -> Values:
        match symbol:
            case ClassDefinition():
                return frozenset({ClassValue(symbol)})
            case FunctionDefinition():
                return frozenset({FunctionValue(symbol.module, symbol.node)})
            case NamedValue():
                return self.constant(symbol.module, symbol.node)
            case Module():
                return frozenset({ModuleValue(symbol)})
            case External():
                return frozenset({Unknown(symbol.dotted)})

    def _attribute(self, owners: Values, name: str) -> Values:
        found: set[Value] = set()
        for owner in owners:
            if isinstance(owner, ModuleValue):
                symbols = self.table.index.import_symbols(owner.module.name, name)
                found = found.union(*map(self._symbol, symbols))
            elif isinstance(owner, Part):
                found.add(owner)
            elif isinstance(owner, Unknown):
                found.add(Unknown(f"{owner.what}.{name}", owner.is_model))
            elif (values := self.attribute(owner, name)) is not None:
                found |= values
            elif isinstance(owner, Instance):
                found.add(Part(owner))  # it is read, so that something must have set it
        return frozenset(found)

    def _call(self, call: ast.Call, frame: Frame) -> Values:
        function = call.func
        if isinstance(function, ast.Name) and function.id not in frame.variables:
            special = self._builtin(function.id, call, frame)
            if special is not None:
                return special
        if isinstance(function, ast.Attribute):
            if function.attr == "partial" and call.args:
                return self.evaluate(call.args[0], frame)
            return self._method_call(call, function, frame)
        return self._call_values(self.evaluate(function, frame), call, frame)

    def _builtin(self, name: str, call: ast.Call, frame: Frame) -> Values | None:
        args = call.args
        if name == "super" and frame.owner and frame.receiver:
            return frozenset({SuperValue(frame.owner, frame.receiver)})
        if name == "getattr" and len(args) >= 2 and isinstance(args[1], ast.Constant):
            return self._getattr(args, str(args[1].value), frame)
        if name == "setattr" and len(args) == 3 and isinstance(args[1], ast.Constant):
            target = ast.Attribute(args[0], str(args[1].value), ast.Store(), lineno=call.lineno)
            self.assign(target, args[2], frame)
            return NOTHING
        if name == "partial" and args:
            return self.evaluate(args[0], frame)
        if name == "type" and len(args) == 1:
            owners = self.evaluate(args[0], frame)
            return frozenset(ClassValue(v.cls) for v in owners if isinstance(v, Instance))
        if name in PASSING:
            return self.evaluate(args[-1], frame) if args else NOTHING
        return NOTHING if hasattr(builtins, name) else None

    def _getattr(self, args: list[ast.expr], name: str, frame: Frame) -> Values:
        found: Values = NOTHING
        for owner in self.evaluate(args[0], frame):
            known = self.has(owner, name) if isinstance(owner, Instance) else None
            if known is not False:
                found |= self._attribute(frozenset({owner}), name)
            if known is not True and len(args) > 2:
                found |= self.evaluate(args[2], frame)
        return found

    def assign(self, target: ast.expr, value: ast.expr, frame: Frame) -> None:
        """One assignment, to a variable or to an attribute of what a variable holds."""
        values = self.evaluate(value, frame)
        if isinstance(target, ast.Name):
            frame.variables[target.id] = values
        elif isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for number, part in enumerate(target.elts):
                if same and isinstance(value, ast.Tuple):
                    self.assign(part, value.elts[number], frame)
                elif isinstance(part, ast.Name):
                    frame.variables[part.id] = elements(values)
        elif isinstance(target, ast.Attribute):
            self._write(target, values, frame, constant=isinstance(value, ast.Constant))
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute):
            self._write(target.value, values, frame, in_place=True)

    def _write(
        self,
        target: ast.Attribute,
        values: Values,
        frame: Frame,
        *,
        constant: bool = False,
        in_place: bool = False,
    ) -> None:
        owners = self.evaluate(target.value, frame)
        for owner in owners:
            part = isinstance(owner, Part)
            instance = owner.owner if isinstance(owner, Part) else owner
            if isinstance(instance, Instance):
                module, name = frame.module, target.attr
                write = Write(instance, name, module, target, part, constant, in_place)
                self.write(frame, write, values)
        if not any(isinstance(o, Instance | Part) for o in owners):
            frame.trace.unfollowed.append(f"{ast.unparse(target)} = …")

    def _method_call(self, call: ast.Call, function: ast.Attribute, frame: Frame) -> Values:
        owners = self.evaluate(function.value, frame)
        results: set[Value] = set()
        for owner in owners:
            if isinstance(owner, Collection):
                results |= elements(frozenset({owner}))
            elif isinstance(owner, Part):
                results.add(owner)
                if function.attr in MUTATING and isinstance(function.value, ast.Attribute):
                    self._write(function.value, NOTHING, frame, in_place=True)
                else:
                    frame.trace.unfollowed.append(ast.unparse(function))
            elif isinstance(owner, Instance | SuperValue):
                results |= self._bound_call(owner, call, function, frame)
            else:
                if isinstance(owner, Unknown) and owner.is_model:
                    frame.trace.unfollowed.append(ast.unparse(function))
                members = self._attribute(frozenset({owner}), function.attr)
                results |= self._call_values(members, call, frame)
        return frozenset(results)

    def _bound_call(
        self, owner: Instance | SuperValue, call: ast.Call, function: ast.Attribute, frame: Frame
    ) -> Values:
        members = self.attribute(owner, function.attr)
        if members is not None:
            return self._call_values(members, call, frame)
        if isinstance(owner, Instance) and self.has(owner, function.attr) is False:
            if function.attr in SELF_RETURNING:
                return frozenset({owner})
            certain = not self.uncertain
            missing = MissingCall(owner, function.attr, frame.module, function, certain)
            frame.trace.missing.append(missing)
        elif isinstance(owner, Instance):
            frame.trace.unfollowed.append(ast.unparse(function))
        return NOTHING

    def _call_values(self, callees: Values, call: ast.Call, frame: Frame) -> Values:
        results: set[Value] = set()
        for callee in callees:
            match callee:
                case ClassValue():
                    results.add(self._construct(callee, call, frame))
                case FunctionValue():
                    results |= self._enter(callee, call, frame)
                case Part():
                    results.add(callee)
                case Unknown():
                    results.add(callee)
                    self._note_escape(call, frame, callee.what)
        return frozenset(results)

    def _construct(self, callee: ClassValue, call: ast.Call, frame: Frame) -> Instance:
        found = self.table.find(callee.cls, "__init__")
        if not found or not isinstance(found.node, Function):
            return Instance(callee.cls)
        arguments = self.match_arguments(call, found.node, frame, skip=1)
        kept = {
            name: frozenset(v for v in values if isinstance(v, ClassValue | Instance))
            for name, values in arguments.items()
        }
        return Instance(callee.cls, tuple(sorted((n, v) for n, v in kept.items() if v)))

    def _enter(self, callee: FunctionValue, call: ast.Call, frame: Frame) -> Values:
        receiver, skip = callee.receiver, 0 if callee.receiver is None else 1
        if isinstance(receiver, ClassValue) and not decorated(callee.node, "classmethod"):
            # `Base.__init__(self, …)`: the receiver is the first argument.
            first = self.evaluate(call.args[0], frame) if call.args else NOTHING
            receiver = next((v for v in first if isinstance(v, Instance)), None)
            callee = FunctionValue(callee.module, callee.node, callee.owner, receiver)
            skip = 0
        hook = self.hooks.get(callee.node.name)
        arguments = self.match_arguments(call, callee.node, frame, skip=skip)
        replaced = hook(callee, arguments) if hook else None
        if replaced is not None:
            return replaced
        if callee.owner is None and not self.followed(callee.module):
            self._note_escape(call, frame, callee.node.name)
            return frozenset({Unknown(f"{callee.module.name}.{callee.node.name}")})
        trace = self.run(callee, arguments)
        frame.trace.absorb(trace)
        return frozenset(trace.returns)

    def _note_escape(self, call: ast.Call, frame: Frame, name: str) -> None:
        """A model handed to code that is not followed: it may do anything to it."""
        for argument in [*call.args, *(k.value for k in call.keywords)]:
            if any(isinstance(v, Instance) for v in self.evaluate(argument, frame)):
                frame.trace.unfollowed.append(f"{name}({ast.unparse(argument)})")
