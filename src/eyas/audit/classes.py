"""Classes of the audited package: bases, method resolution order, and where a member comes from."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from eyas.audit.modules import (
    ClassDefinition,
    External,
    Module,
    ModuleIndex,
    NamedValue,
    Symbol,
    blocks,
    is_type_checking,
)

Function = ast.FunctionDef | ast.AsyncFunctionDef

# What classes of other packages give their subclasses, of all that an interface names. A base that
# matches none of these prefixes may supply anything.
EXTERNAL_MEMBERS: tuple[tuple[str, frozenset[str]], ...] = (
    ("torch.nn.", frozenset()),
    ("nn.", frozenset()),
    ("abc.", frozenset()),
    ("typing.", frozenset()),
    ("typing_extensions.", frozenset()),
    ("enum.", frozenset()),
    ("object", frozenset()),
    ("ABC", frozenset()),
    ("Protocol", frozenset()),
    ("Generic", frozenset()),
    ("transformers.", frozenset({"forward", "get_input_embeddings"})),
)


@dataclass(frozen=True)
class Base:
    """One base of a class, as written: the classes it may be, and what lies outside the tree."""

    text: str
    classes: tuple[ClassDefinition, ...]
    externals: tuple[External, ...]


@dataclass(frozen=True)
class Found:
    """Where a member of a class comes from.

    `node` is the function, the assigned value, or (instance attributes) the assignment.
    """

    owner: ClassDefinition
    node: ast.AST
    kind: Literal["class", "instance", "patch"]

    @property
    def location(self) -> str:
        """File and line."""
        return f"{self.owner.module.file}:{getattr(self.node, 'lineno', 0)}"


class ClassTable:
    """Inheritance over a `ModuleIndex`."""

    def __init__(self, index: ModuleIndex) -> None:
        self.index = index
        self._bases: dict[ClassDefinition, list[Base]] = {}
        self._mros: dict[ClassDefinition, list[ClassDefinition]] = {}
        self._members: dict[ClassDefinition, dict[str, list[ast.AST]]] = {}
        self._stores: dict[ClassDefinition, dict[str, ast.AST]] = {}

    def resolve(self, module: Module, expression: ast.expr) -> list[Symbol]:
        """What a name, a dotted name or a subscripted generic stands for."""
        if isinstance(expression, ast.Name):
            symbols = self.index.resolve(module, expression.id)
        elif isinstance(expression, ast.Attribute):
            symbols = [
                found
                for owner in self.resolve(module, expression.value)
                for found in self._attribute(owner, expression.attr)
            ]
        elif isinstance(expression, ast.Subscript):
            symbols = self.resolve(module, expression.value)
        else:
            symbols = [External(ast.unparse(expression), "not a plain name")]
        return [s for symbol in symbols for s in self._through_alias(symbol)]

    def bases(self, cls: ClassDefinition) -> list[Base]:
        """The bases in order, each with all that its name may stand for."""
        if cls not in self._bases:
            self._bases[cls] = []  # a class that inherits from itself through a cycle ends here
            for expression in cls.node.bases:
                symbols = self.resolve(cls.module, expression)
                classes = tuple(s for s in symbols if isinstance(s, ClassDefinition) and s != cls)
                externals = tuple(
                    s if isinstance(s, External) else External(ast.unparse(expression), "no class")
                    for s in symbols
                    if not isinstance(s, ClassDefinition)
                )
                self._bases[cls].append(Base(ast.unparse(expression), classes, externals))
        return self._bases[cls]

    def mro(self, cls: ClassDefinition) -> list[ClassDefinition]:
        """Classes of the tree in method resolution order; alternatives follow one another."""
        if cls not in self._mros:
            self._mros[cls] = [cls]
            parents = [c for base in self.bases(cls) for c in base.classes]
            self._mros[cls] = [cls, *_merge([*map(self.mro, parents), parents])]
        return self._mros[cls]

    def find(
        self, cls: ClassDefinition, name: str, *, after: ClassDefinition | None = None
    ) -> Found | None:
        """The class-level member that `cls` has under `name` (`super()`: the one after a class)."""
        order = self.mro(cls)
        if after in order:
            order = order[order.index(after) + 1 :]
        for owner in order:
            if patch := owner.module.patches.get((owner.name, name)):
                return Found(owner, patch, "patch")
            if nodes := self.members(owner).get(name):
                return Found(owner, nodes[-1], "class")
        return None

    def find_store(self, cls: ClassDefinition, name: str) -> Found | None:
        """An assignment to `self.<name>` in any method of the class or its bases."""
        for owner in self.mro(cls):
            if node := self.stores(owner).get(name):
                return Found(owner, node, "instance")
        return None

    def guaranteed(self, cls: ClassDefinition, name: str) -> bool:
        """Whether every way through the conditional definitions gives `cls` the member."""
        if (cls.name, name) in cls.module.patches or _defines(cls.node.body, name):
            return True
        return any(
            base.classes
            and not base.externals
            and all(self.guaranteed(c, name) for c in base.classes)
            for base in self.bases(cls)
        )

    def members(self, cls: ClassDefinition) -> dict[str, list[ast.AST]]:
        """Names bound in the class body, each with its definitions in order."""
        if cls not in self._members:
            members: dict[str, list[ast.AST]] = {}
            for name, node in _body_bindings(cls.node.body):
                members.setdefault(name, []).append(node)
            self._members[cls] = members
        return self._members[cls]

    def stores(self, cls: ClassDefinition) -> dict[str, ast.AST]:
        """Attributes that the class's own methods assign on `self`, with the first assignment."""
        if cls not in self._stores:
            stores: dict[str, ast.AST] = {}
            for nodes in self.members(cls).values():
                for function in nodes:
                    if isinstance(function, Function) and function.args.args:
                        self_name = function.args.args[0].arg
                        for node in ast.walk(function):
                            if (
                                isinstance(node, ast.Attribute)
                                and isinstance(node.ctx, ast.Store)
                                and isinstance(node.value, ast.Name)
                                and node.value.id == self_name
                            ):
                                stores.setdefault(node.attr, node)
            self._stores[cls] = stores
        return self._stores[cls]

    def externals(self, cls: ClassDefinition) -> list[External]:
        """Bases of the class or of its bases that lie outside the tree."""
        return [e for c in self.mro(cls) for base in self.bases(c) for e in base.externals]

    def outside(self, cls: ClassDefinition, name: str) -> Literal["no", "yes", "unknown"]:
        """Whether a base outside the tree supplies `name`."""
        answer: Literal["no", "unknown"] = "no"
        for external in self.externals(cls):
            known = next((m for p, m in EXTERNAL_MEMBERS if external.dotted.startswith(p)), None)
            if external.reason or known is None:
                answer = "unknown"
            elif name in known:
                return "yes"
        return answer

    def dynamic(self, cls: ClassDefinition) -> Found | None:
        """The `__getattr__` (or `__getattribute__`) of the class or a base in the tree."""
        return self.find(cls, "__getattr__") or self.find(cls, "__getattribute__")

    def _attribute(self, owner: Symbol, name: str) -> list[Symbol]:
        if isinstance(owner, Module):
            return self.index.import_symbols(owner.name, name)
        if isinstance(owner, ClassDefinition):
            found = self.find(owner, name)
            if found and isinstance(found.node, ast.ClassDef):
                return [self.index.class_of(found.owner.module, found.node)]
            if found and isinstance(found.node, ast.expr):
                return self.resolve(found.owner.module, found.node)
        if isinstance(owner, External):
            return [External(f"{owner.dotted}.{name}", owner.reason)]
        return [External(name, "not a class")]

    def _through_alias(self, symbol: Symbol) -> list[Symbol]:
        if isinstance(symbol, NamedValue) and isinstance(symbol.node, ast.Attribute):
            return self.resolve(symbol.module, symbol.node)
        if isinstance(symbol, NamedValue) and isinstance(symbol.node, ast.IfExp):
            arms = (symbol.node.body, symbol.node.orelse)
            return [s for arm in arms for s in self.resolve(symbol.module, arm)]
        return [symbol]


def _merge(sequences: list[list[ClassDefinition]]) -> list[ClassDefinition]:
    """C3 linearization; where the order is inconsistent, the first in line goes first."""
    order: list[ClassDefinition] = []
    pending = [list(s) for s in sequences if s]
    while pending:
        heads = (s[0] for s in pending)
        head = next((h for h in heads if not any(h in s[1:] for s in pending)), pending[0][0])
        order.append(head)
        pending = [rest for s in pending if (rest := [c for c in s if c is not head])]
    return order


def _body_bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, node
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            yield from _body_bindings(node.orelse)
        else:
            for block in blocks(node):
                yield from _body_bindings(block)


def _defines(body: list[ast.stmt], name: str) -> bool:
    """Whether running a class body is sure to bind `name`."""
    for node in body:
        if isinstance(node, ast.If):
            arms = [node.orelse] if is_type_checking(node.test) else [node.body, node.orelse]
            if all(_defines(arm, name) for arm in arms):
                return True
        elif isinstance(node, ast.Try):
            arms = [node.body, *(h.body for h in node.handlers)]
            if all(_defines(a, name) or _raises(a) for a in arms) or _defines(node.finalbody, name):
                return True
        elif isinstance(node, ast.With):
            if _defines(node.body, name):
                return True
        elif any(bound == name for bound, _ in _body_bindings([node])):
            return True
    return False


def _raises(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)


def is_stub(node: ast.AST) -> bool:
    """Whether a member is there in name only: None, or a body that does nothing but raise."""
    if isinstance(node, ast.Constant):
        return node.value is None
    if not isinstance(node, Function):
        return False
    body = [n for n in node.body if not (isinstance(n, ast.Expr) and _is_text(n.value))]
    return all(
        isinstance(n, ast.Raise | ast.Pass)
        or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        for n in body
    )


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is a string literal, such as a docstring."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def decorated(function: Function, name: str) -> bool:
    """Whether a decorator of that name stands on the function."""
    names = (getattr(d, "id", getattr(d, "attr", None)) for d in function.decorator_list)
    return name in names
