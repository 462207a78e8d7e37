"""Parsed modules of the audited package, and what a name in one of them stands for.

Nothing is imported: names are followed through `import` statements, aliases and re-exports on the
syntax trees alone. A name may stand for several things (a class defined differently on each
platform), so that every look-up returns all of them.
"""

import ast
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from eyas.audit.source import SourceTree, UnreadableFileError


@dataclass(frozen=True)
class Problem:
    """A file that could not be audited."""

    file: str
    line: int
    message: str


@dataclass(frozen=True, eq=False)
class Binding:
    """One statement that gives a module-level name its meaning."""

    kind: Literal["class", "function", "import", "value"]
    node: ast.AST
    target: str = ""  # import: dotted module
    attribute: str | None = None  # import: the name in that module; None: the module itself


@dataclass(eq=False)
class Module:
    """A parsed module. `file` is the path to print ("sglang/srt/models/llama.py")."""

    name: str
    file: str
    tree: ast.Module
    is_package: bool
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    # Bound under TYPE_CHECKING only: the module resolves the name lazily, to the same thing.
    typing_bindings: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    # `Model.method = function` and `setattr(Model, "method", function)` at module level.
    patches: dict[tuple[str, str], ast.expr] = field(default_factory=dict)

    def absolute(self, level: int, name: str | None) -> str:
        """The dotted module that `from <level dots><name> import …` means here."""
        if level == 0:
            return name or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - level + (1 if self.is_package else 0)]
        return ".".join([*parts, *([name] if name else [])])


@dataclass(frozen=True, eq=False)
class ClassDefinition:
    """One `class` statement."""

    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """The class's own name."""
        return self.node.name

    @property
    def location(self) -> str:
        """File and line."""
        return f"{self.module.file}:{self.node.lineno}"


@dataclass(frozen=True, eq=False)
class FunctionDefinition:
    """One module-level function."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class NamedValue:
    """A module-level assignment that is not a plain alias."""

    module: Module
    node: ast.expr


@dataclass(frozen=True)
class External:
    """A name that leads out of the package, or nowhere.

    `reason` is "" for another package's name, otherwise why the name cannot be followed.
    """

    dotted: str
    reason: str = ""


Symbol = ClassDefinition | FunctionDefinition | NamedValue | Module | External


class ModuleIndex:
    """Parses modules of a tree on demand and resolves names across them."""

    def __init__(self, tree: SourceTree, package: str) -> None:
        self.tree = tree
        self.package = package
        self.problems: dict[str, Problem] = {}
        self._modules: dict[str, Module | None] = {}
        self._classes: dict[ast.ClassDef, ClassDefinition] = {}

    def get(self, name: str) -> Module | None:
        """The module, or None where it is not in the tree or cannot be parsed (see `problems`)."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def resolve(self, module: Module, name: str) -> list[Symbol]:
        """All that `name` may stand for at the end of `module`; builtins come back external."""
        return self._lookup(module, name, frozenset()) or [External(name)]

    def import_symbols(self, target: str, attribute: str | None) -> list[Symbol]:
        """What `import target` or `from target import attribute` binds."""
        return self._import(target, attribute, frozenset())

    def class_of(self, module: Module, node: ast.ClassDef) -> ClassDefinition:
        """The one `ClassDefinition` of a class statement."""
        return self._classes.setdefault(node, ClassDefinition(module, node))

    def _parse(self, name: str) -> Module | None:
        file = self.tree.modules.get(name)
        if file is None:
            return None
        shown = f"{self.package}/{file}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in others' strings
                tree = ast.parse(self.tree.read(file))
        except UnreadableFileError as error:
            self.problems[name] = Problem(shown, 0, str(error))
        except SyntaxError as error:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            message = f"not Python {version}: {error.msg}"
            self.problems[name] = Problem(shown, error.lineno or 0, message)
        except (ValueError, RecursionError, MemoryError) as error:
            self.problems[name] = Problem(shown, 0, f"cannot be parsed: {error}")
        else:
            module = Module(name, shown, tree, is_package=file.endswith("__init__.py"))
            _Binder(module).bind(tree.body, certain=True)
            return module
        return None

    def _lookup(self, module: Module, name: str, seen: frozenset[tuple[str, str]]) -> list[Symbol]:
        if (module.name, name) in seen:
            return []  # an import cycle: whatever it leads to is found on the other way round
        seen |= {(module.name, name)}
        bindings = module.bindings.get(name) or module.typing_bindings.get(name, [])
        symbols = [s for b in bindings for s in self._binding(module, b, seen)]
        if not symbols:
            for target in module.stars:
                if other := self.get(target):
                    symbols += self._lookup(other, name, seen)
        return list(dict.fromkeys(symbols))

    def _binding(
        self, module: Module, binding: Binding, seen: frozenset[tuple[str, str]]
    ) -> list[Symbol]:
        node = binding.node
        if isinstance(node, ast.ClassDef):
            return [self.class_of(module, node)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return [FunctionDefinition(module, node)]
        if binding.kind == "import":
            return self._import(binding.target, binding.attribute, seen)
        if isinstance(node, ast.Name):
            return self._lookup(module, node.id, seen) or [External(node.id)]
        if isinstance(node, ast.Constant) and node.value is None:
            return []
        return [NamedValue(module, node)] if isinstance(node, ast.expr) else []

    def _import(
        self, target: str, attribute: str | None, seen: frozenset[tuple[str, str]]
    ) -> list[Symbol]:
        dotted = f"{target}.{attribute}" if attribute else target
        if target.split(".")[0] != self.package:
            return [External(dotted)]
        module = self.get(target)
        if attribute is None:
            return [module] if module else [External(dotted, self._why_missing(target))]
        if module and (symbols := self._lookup(module, attribute, seen)):
            return symbols
        if (submodule := self.get(dotted)) is not None:
            return [submodule]
        if module and (target, attribute) in seen:
            return []
        reason = self._why_missing(target) if module is None else f"not defined in {target}"
        return [External(dotted, reason)]

    def _why_missing(self, name: str) -> str:
        if problem := self.problems.get(name):
            return f"{problem.file} cannot be read"
        return f"module {name} is not in the tree"


class _Binder:
    """Collects a module's bindings, the branches of `if` and `try` included."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def bind(self, body: list[ast.stmt], *, certain: bool, typing: bool = False) -> None:
        for node in body:
            for name, binding in self._bindings(node):
                table = self.module.typing_bindings if typing else self.module.bindings
                if certain and not isinstance(node, ast.AugAssign):
                    table[name] = [binding]
                else:
                    table.setdefault(name, []).append(binding)
            if isinstance(node, ast.If):
                checking = is_type_checking(node.test)
                self.bind(node.body, certain=False, typing=typing or checking)
                self.bind(node.orelse, certain=certain and checking, typing=typing)
            elif isinstance(node, ast.Try | ast.With | ast.For | ast.While | ast.Match):
                for block in blocks(node):
                    self.bind(block, certain=certain and isinstance(node, ast.With), typing=typing)

    def _bindings(self, node: ast.stmt) -> Iterator[tuple[str, Binding]]:
        if isinstance(node, ast.ClassDef):
            yield node.name, Binding("class", node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, Binding("function", node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from import_bindings(self.module, node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from self._assigned(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            yield from self._assigned(node.target, node.value)
        elif (
            isinstance(node, ast.Expr)
            and isinstance(call := node.value, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == "setattr"
            and len(call.args) == 3
            and isinstance(owner := call.args[0], ast.Name)
            and isinstance(name := call.args[1], ast.Constant)
        ):
            self.module.patches[owner.id, str(name.value)] = call.args[2]

    def _assigned(self, target: ast.expr, value: ast.expr) -> Iterator[tuple[str, Binding]]:
        if isinstance(target, ast.Name):
            yield target.id, Binding("value", value)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            self.module.patches[target.value.id, target.attr] = value
        elif (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for one, its_value in zip(target.elts, value.elts, strict=True):
                yield from self._assigned(one, its_value)


def import_bindings(
    module: Module, node: ast.Import | ast.ImportFrom
) -> Iterator[tuple[str, Binding]]:
    """The names that an import statement binds in `module`; stars are noted on the module."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            target = alias.name if alias.asname else alias.name.split(".")[0]
            yield alias.asname or target, Binding("import", node, target)
        return
    target = module.absolute(node.level, node.module)
    for alias in node.names:
        if alias.name == "*":
            module.stars.append(target)
        else:
            yield alias.asname or alias.name, Binding("import", node, target, alias.name)


def blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statement lists nested directly in a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(node, name, None):
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition is `TYPE_CHECKING`."""
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )
