"""What an expression of the audited source may evaluate to, as far as the audit follows it."""

import ast
from dataclasses import dataclass, field

from eyas.audit.classes import Function
from eyas.audit.modules import ClassDefinition, Module


@dataclass(frozen=True)
class ClassValue:
    """A class object of the tree."""

    cls: ClassDefinition


@dataclass(frozen=True)
class Instance:
    """An instance of a class of the tree.

    `arguments` holds the constructor's parameters whose values the audit follows (classes and
    instances): a class handed to `__init__` decides what the inner model is.
    """

    cls: ClassDefinition
    arguments: tuple[tuple[str, "Values"], ...] = ()


@dataclass(frozen=True)
class FunctionValue:
    """A function of the tree, or a method bound to `receiver` and defined in `owner`."""

    module: Module
    node: Function
    owner: ClassDefinition | None = None
    receiver: "Instance | ClassValue | None" = None


@dataclass(frozen=True)
class ModuleValue:
    """A module of the tree."""

    module: Module


@dataclass(frozen=True)
class SuperValue:
    """`super()` inside a method defined in `owner`."""

    owner: ClassDefinition
    receiver: "Instance | ClassValue"


@dataclass(frozen=True)
class Part:
    """Something inside an instance whose own class is not followed, such as one of its layers."""

    owner: Instance


@dataclass(frozen=True)
class Text:
    """A string literal."""

    value: str


@dataclass(frozen=True)
class Collection:
    """A dict's values, or the elements of a list, tuple or set."""

    elements: "Values"


@dataclass(frozen=True)
class Unknown:
    """A value out of reach; `what` names it as far as it is known ("torch.nn.Linear").

    `is_model`: the engine says that it is (part of) a model, so that what is done to it matters.
    """

    what: str
    is_model: bool = False


Value = (
    ClassValue
    | Instance
    | FunctionValue
    | ModuleValue
    | SuperValue
    | Part
    | Text
    | Collection
    | Unknown
)
Values = frozenset[Value]
NOTHING: Values = frozenset()


def texts(values: Values) -> list[str]:
    """All string literals among the values and the elements of their collections."""
    found = {v.value for v in values if isinstance(v, Text)}
    for value in values:
        if isinstance(value, Collection):
            found.update(texts(value.elements))
    return sorted(found)


def elements(values: Values) -> Values:
    """What an element of the value may be; an element of an instance is a part of it."""
    found: set[Value] = set()
    for value in values:
        match value:
            case Collection():
                found |= value.elements
            case Instance():
                found.add(Part(value))
            case Part() | Unknown():
                found.add(value)
    return frozenset(found)


@dataclass(frozen=True)
class Write:
    """An assignment to an attribute of an instance, or of a part of it (one of its layers).

    `in_place`: an element is set or added, the attribute itself stays.
    """

    owner: Instance
    attribute: str
    module: Module
    node: ast.AST
    on_part: bool
    constant: bool  # a literal is assigned: a flag, not the layer ids
    in_place: bool = False

    @property
    def location(self) -> str:
        """File and line."""
        return f"{self.module.file}:{getattr(self.node, 'lineno', 0)}"


@dataclass(frozen=True)
class MissingCall:
    """A call of a method that the receiver's class does not have."""

    receiver: Instance
    method: str
    module: Module
    node: ast.AST
    certain: bool  # in no branch that may not be taken

    @property
    def location(self) -> str:
        """File and line."""
        return f"{self.module.file}:{getattr(self.node, 'lineno', 0)}"


@dataclass
class Trace:
    """What running a function did: its possible results and effects."""

    returns: set[Value] = field(default_factory=set)
    writes: list[Write] = field(default_factory=list)
    missing: list[MissingCall] = field(default_factory=list)
    unfollowed: list[str] = field(default_factory=list)  # effects out of the audit's sight
    raises: bool = False  # every run ends in a `raise`

    def absorb(self, inner: "Trace") -> None:
        """Adds the effects (not the results) of a function that was called."""
        self.writes += inner.writes
        self.missing += inner.missing
        self.unfollowed += inner.unfollowed
        self.raises = self.raises or inner.raises


@dataclass
class Frame:
    """A running function: its module, the variables, and what it has done so far."""

    module: Module
    owner: ClassDefinition | None = None
    receiver: Instance | ClassValue | None = None
    variables: dict[str, Values] = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    may_have_ended: bool = False  # a branch that may be taken returns or raises
