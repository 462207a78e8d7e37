"""Which members of the interface a class has, and where its inner model lies."""

import ast

from eyas.audit.classes import Found, is_stub
from eyas.audit.engines import Engine, Export
from eyas.audit.modules import ClassDefinition
from eyas.audit.report import InnerClass, InnerModel, Member, MemberState, State
from eyas.audit.values import Instance

MAX_WRAPPERS = 3
# A name that is defined differently, by platform or by version, has the weakest of its states,
# but "conditional" where only some definitions have the member.
WEAKEST_FIRST: tuple[State, ...] = (
    "stub",
    "unknown",
    "dynamic",
    "conditional",
    "missing",
    "present",
)


def member_state(engine: Engine, export: Export, member: Member) -> MemberState:
    """The state of a member over all definitions of an exported name."""
    states = [_state(engine, cls, member) for cls in export.definitions]
    kinds = {s.state for s in states}
    if len(kinds) == 1:
        return states[0]
    if "missing" in kinds and kinds & {"present", "conditional"}:
        lacking = [
            c.location
            for c, s in zip(export.definitions, states, strict=True)
            if s.state == "missing"
        ]
        having = next(s for s in states if s.state != "missing")
        detail = f"missing from {', '.join(lacking)}"
        return MemberState(member.name, member.level, "conditional", having.location, detail)
    return min(states, key=lambda s: WEAKEST_FIRST.index(s.state))


def has_member(engine: Engine, cls: ClassDefinition, name: str) -> bool:
    """Whether instances of the class surely or sometimes have the member, and not as a stub."""
    found = engine.table.find(cls, name)
    if found:
        return not is_stub(found.node)
    return bool(engine.interpreter.has(Instance(cls), name))


def inner_model(
    engine: Engine, cls: ClassDefinition, interface: tuple[Member, ...], depth: int = MAX_WRAPPERS
) -> InnerModel | None:
    """The model inside a wrapper, if the class is one.

    It is the attribute that holds a model which makes logits; else the one that holds a decoder
    with a required member. Where the model found is a wrapper itself and has no required member,
    the search goes on inside it.
    """
    required = [m.name for m in interface if m.level == "required"]
    ranked = []
    for name, instances in engine.inner_classes(cls).items():
        full = any(engine.is_full_model(i.cls) for i in instances)
        wraps = depth > 1 and any(
            deeper.classes
            for i in instances
            if i.cls is not cls and (deeper := inner_model(engine, i.cls, interface, depth - 1))
        )
        count = max(sum(has_member(engine, i.cls, m) for m in required) for i in instances)
        if full or wraps or count:
            places = engine.inner_attributes
            order = places.index(name) if name in places else len(places)
            ranked.append((not full, -count, order, name))
    if not ranked:
        return _unfollowed(engine, cls)
    _, count, _, name = min(ranked)
    instances = engine.inner_classes(cls)[name]
    location = _location(engine, cls, name)
    if not count and depth > 1:
        for instance in instances:
            deeper = inner_model(engine, instance.cls, interface, depth - 1)
            if deeper and any(c.has for c in deeper.classes):
                return InnerModel(f"{name}.{deeper.path}", location, deeper.classes)
    names = [m.name for m in interface if m.level != "context-parallel"]
    classes = tuple(_inner_class(engine, i.cls, names) for i in instances)
    return InnerModel(name, location, classes)


def _inner_class(engine: Engine, cls: ClassDefinition, names: list[str]) -> InnerClass:
    has = tuple(n for n in names if has_member(engine, cls, n))
    return InnerClass(cls.name, cls.location, has, engine.is_full_model(cls))


def _unfollowed(engine: Engine, cls: ClassDefinition) -> InnerModel | None:
    """A wrapper whose inner class is not written in the source, such as one the config names."""
    attributes = engine.interpreter.attributes(Instance(cls))
    for name in engine.inner_attributes:
        values = attributes.get(name, frozenset())
        if values and not any(isinstance(v, Instance) for v in values):
            return InnerModel(name, _location(engine, cls, name), ())
    return None


def _location(engine: Engine, cls: ClassDefinition, attribute: str) -> str:
    found = engine.table.find_store(cls, attribute)
    return found.location if found else cls.location


def _state(engine: Engine, cls: ClassDefinition, member: Member) -> MemberState:
    table, name = engine.table, member.name

    def state(state: State, location: str = "", detail: str = "") -> MemberState:
        return MemberState(name, member.level, state, location, detail)

    found = table.find(cls, name)
    if found and is_stub(found.node):
        return state("stub", found.location, "does nothing but raise, or nothing at all")
    if found:
        source = "" if found.owner is cls else f"from {found.owner.name}"
        certain = found.kind == "patch" or table.guaranteed(cls, name)
        return state("present" if certain else "conditional", found.location, source)
    if found := table.find_store(cls, name):
        return state("present", found.location, "set on the instance")
    if dynamic := table.dynamic(cls):
        return state("dynamic", dynamic.location, _dynamic_detail(engine, cls, dynamic, name))
    outside = table.outside(cls, name)
    if outside == "no":
        return state("missing")
    bases = [e.dotted + (f" ({e.reason})" if e.reason else "") for e in table.externals(cls)]
    detail = f"depends on {', '.join(bases)}"
    return state("present" if outside == "yes" else "unknown", "", detail)


def _dynamic_detail(engine: Engine, cls: ClassDefinition, dynamic: Found, name: str) -> str:
    """What a `__getattr__` that hands on to an attribute would find there."""
    for node in ast.walk(dynamic.node):
        match node:
            case ast.Call(
                func=ast.Name("getattr"),
                args=[ast.Attribute(value=ast.Name("self"), attr=attribute), *_],
            ):
                held = engine.inner_classes(cls).get(attribute, [])
                having = [i.cls.name for i in held if has_member(engine, i.cls, name)]
                if not held:
                    return f"left to __getattr__, which asks self.{attribute}"
                has = f"in {', '.join(having)}" if having else "in none of its classes"
                return f"left to __getattr__, which asks self.{attribute}: {has}"
    return "left to __getattr__"
