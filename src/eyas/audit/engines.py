"""What the audit must know of an engine: its interface, its exported classes, which count."""

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from eyas.audit.classes import ClassTable, Function
from eyas.audit.evaluator import Hook
from eyas.audit.interpreter import Interpreter
from eyas.audit.modules import ClassDefinition, Module, ModuleIndex, Problem
from eyas.audit.report import Member, Role
from eyas.audit.source import SourceTree
from eyas.audit.values import Instance, Unknown, Value


@dataclass(frozen=True)
class Export:
    """A class that the engine can be asked to serve.

    Several definitions stand for one name that is defined differently, for instance by platform.
    `group` is the registry's group, where the engine has groups.
    """

    name: str
    definitions: tuple[ClassDefinition, ...]
    architectures: tuple[str, ...]
    group: str = ""


class Engine(ABC):
    """One engine's sources, opened. Subclasses hold what differs between engines."""

    name: ClassVar[str]
    package: ClassVar[str]
    models: ClassVar[str]  # folder of the models, relative to the package
    # The declared type that has the whole interface, where the engine has one: a class without a
    # member of it fails as a whole, and is one finding.
    protocol: ClassVar[str] = ""
    # Where the inner model of a wrapper usually lies; breaks ties between attributes.
    inner_attributes: ClassVar[tuple[str, ...]] = ("language_model", "llm", "model", "thinker")

    def __init__(self, tree: SourceTree) -> None:
        self.index = ModuleIndex(tree, self.package)
        self.table = ClassTable(self.index)
        self.interpreter = Interpreter(
            self.table, followed=self.is_model_module, hooks=self.hooks()
        )
        self.unresolved: list[Problem] = []

    def close(self) -> None:
        """Lets go of the syntax trees: in a reference cycle, collecting them takes seconds."""
        del self.interpreter

    @property
    def models_module(self) -> str:
        """Dotted name of the package that holds the models."""
        return f"{self.package}.{self.models.replace('/', '.')}"

    def is_model_module(self, module: Module) -> bool:
        """Whether helper functions of a module are followed when a model calls them."""
        return module.name.startswith(self.models_module)

    def hooks(self) -> dict[str, Hook]:
        """Functions whose result the engine decides at run time."""
        return {}

    @abstractmethod
    def interface(self) -> tuple[Member, ...]:
        """The members of this release's EAGLE-3 interface; raises AuditError if it has none."""

    @abstractmethod
    def exports(self) -> list[Export]:
        """The exported classes, by name."""

    @abstractmethod
    def role(self, export: Export) -> tuple[Role, str]:
        """Whether a lack in the class is a finding, and why."""

    @abstractmethod
    def is_full_model(self, cls: ClassDefinition) -> bool:
        """Whether the class makes logits itself (and is no bare decoder)."""

    def notes(self, cls: ClassDefinition) -> Iterator[str]:
        """Oddities of a class that are no findings."""
        yield from ()

    def fix(self, export: Export) -> str | None:
        """A way to add the whole interface at once that the engine offers, instead of methods."""
        return None

    def holds(self, cls: ClassDefinition, class_name: str) -> bool:
        """Whether an attribute of the class is set to an instance of a class of that name."""
        values = self.interpreter.attributes(Instance(cls)).values()
        return any(_class_name(value) == class_name for held in values for value in held)

    def inner_classes(self, cls: ClassDefinition) -> dict[str, list[Instance]]:
        """Attributes that hold instances of classes of the tree."""
        attributes = self.interpreter.attributes(Instance(cls))
        held = {
            name: sorted(
                (v for v in values if isinstance(v, Instance)),
                key=lambda v: (v.cls.name, v.cls.location),
            )
            for name, values in attributes.items()
        }
        return {name: instances for name, instances in held.items() if instances}


def _class_name(value: Value) -> str:
    if isinstance(value, Instance):
        return value.cls.name
    return value.what.rsplit(".", 1)[-1] if isinstance(value, Unknown) else ""


def calls_with(table: ClassTable, cls: ClassDefinition, keyword: str) -> bool:
    """Whether a method of the class passes `keyword=True` to anything."""
    return any(
        isinstance(node, ast.keyword)
        and node.arg == keyword
        and isinstance(node.value, ast.Constant)
        and node.value.value is True
        for owner in table.mro(cls)
        for method in owner.node.body
        if isinstance(method, Function)
        for node in ast.walk(method)
    )
