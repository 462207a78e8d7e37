"""The methods that a wrapper lacks, written out as a delegation to its inner model."""

import ast
import copy

from eyas.audit.engines import Engine
from eyas.audit.modules import ClassDefinition
from eyas.audit.report import Member
from eyas.audit.values import Instance

INDENT = "    "


def delegation(engine: Engine, inner_class: ClassDefinition, path: str, member: Member) -> str:
    """Source of the method or property that hands `member` on to `self.<path>`."""
    target = f"self.{path}.{member.name}"
    method = engine.interpreter.method(Instance(inner_class), member.name)
    if method is None:
        return _lines("@property", f"def {member.name}(self):", f"{INDENT}return {target}")
    node = method.node
    return _lines(
        f"def {member.name}({ast.unparse(_bare(node.args))}):",
        f"{INDENT}return {target}({_pass_on(node.args)})",
    )


def _bare(spec: ast.arguments) -> ast.arguments:
    """The parameters without annotations, whose names the wrapper's module may not import."""
    spec = copy.deepcopy(spec)
    for node in ast.walk(spec):
        if isinstance(node, ast.arg):
            node.annotation = None
    return spec


def _pass_on(spec: ast.arguments) -> str:
    """The call's arguments: every parameter of the method but `self`, handed on."""
    positional = [a.arg for a in [*spec.posonlyargs, *spec.args][1:]]
    starred = [f"*{spec.vararg.arg}"] if spec.vararg else []
    keywords = [f"{a.arg}={a.arg}" for a in spec.kwonlyargs]
    doubled = [f"**{spec.kwarg.arg}"] if spec.kwarg else []
    return ", ".join([*positional, *starred, *keywords, *doubled])


def _lines(*lines: str) -> str:
    return "\n".join(INDENT + line for line in lines)
