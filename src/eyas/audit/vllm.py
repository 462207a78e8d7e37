"""vLLM: the interface is the protocol `SupportsEagle3`, models are exported by a registry."""

import ast
from collections.abc import Iterator
from typing import ClassVar

from eyas.audit.classes import Function, is_stub
from eyas.audit.engines import Engine, Export
from eyas.audit.errors import AuditError
from eyas.audit.evaluator import Arguments, Hook
from eyas.audit.modules import ClassDefinition, Module, Problem
from eyas.audit.report import Member, Role
from eyas.audit.values import FunctionValue, Instance, Unknown, Value, Values, texts

PROTOCOL = "SupportsEagle3"
SETTER = "set_aux_hidden_state_layers"
# The protocol's second method, by its newer and its older name: one of them is never called.
LAYER_GETTERS = (
    "get_eagle3_default_aux_hidden_state_layers",
    "get_eagle3_aux_hidden_state_layers",
)
BY_CONFIG = "the class that the config names"


class VLLM(Engine):
    """vLLM's sources."""

    name: ClassVar[str] = "vllm"
    package: ClassVar[str] = "vllm"
    protocol: ClassVar[str] = PROTOCOL
    models: ClassVar[str] = "model_executor/models"

    def is_model_module(self, module: Module) -> bool:
        """Models lie in two packages."""
        return module.name.startswith((self.models_module, f"{self.package}.models."))

    def interface(self) -> tuple[Member, ...]:
        """All members of the protocol: `isinstance` on the loaded model asks for every one."""
        members: dict[str, Member] = {}
        for cls in reversed(self.table.mro(self._protocol())):
            for node in cls.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    name, meaning = node.target.id, "a flag of the protocol"
                elif isinstance(node, Function):
                    name, meaning = node.name, (ast.get_docstring(node) or "").split("\n")[0]
                else:
                    continue
                if name.startswith("_"):
                    continue
                members[name] = Member(
                    name,
                    "required",
                    meaning,
                    is_method=isinstance(node, Function),
                    sets_layers=name == SETTER,
                )
        return tuple(members.values())

    def exports(self) -> list[Export]:
        """The classes of the registry's tables, each with its architectures and groups."""
        found: dict[tuple[ClassDefinition, ...], tuple[list[str], list[str]]] = {}
        for group, architecture, target, class_name in self._registry():
            definitions = self._definitions(target, class_name)
            if definitions:
                architectures, groups = found.setdefault(definitions, ([], []))
                architectures.append(architecture)
                groups.append(group)
            else:
                message = f"{architecture}: {target}.{class_name} cannot be followed"
                self.unresolved.append(Problem(self._registry_module().file, 0, message))
        exports = [
            Export(definitions[0].name, definitions, tuple(sorted(set(names))), " ".join(groups))
            for definitions, (names, groups) in found.items()
        ]
        return sorted(exports, key=lambda e: (e.name, e.definitions[0].location))

    def role(self, export: Export) -> tuple[Role, str]:
        """See "which classes count" in docs/contract.md."""
        groups = set(export.group.split())
        generative = sorted(
            g for g in groups if any(k in g for k in ("GENERATION", "MULTIMODAL", "TRANSFORMERS"))
        )
        if any("SPECULATIVE" in g for g in groups) or export.name.endswith("MTP"):
            return "draft", "registered as a draft"
        if not generative:
            return "not generative", f"registered in {', '.join(sorted(groups))} only"
        if not self.is_full_model(export.definitions[0]):
            return "not generative", "has no compute_logits"
        return "target", f"registered in {generative[0]}, and has compute_logits"

    def is_full_model(self, cls: ClassDefinition) -> bool:
        """Whether it has `compute_logits`, vLLM's own mark of a generation model."""
        return self.table.find(cls, "compute_logits") is not None

    def hooks(self) -> dict[str, Hook]:
        """The registry's look-up of an inner model, and the default look-up of the decoder."""
        return {
            "init_vllm_registered_model": self._registered_model,
            "get_language_model": self._language_model,
        }

    def notes(self, cls: ClassDefinition) -> Iterator[str]:
        """Overrides of the protocol's older names, which nothing calls."""
        protocol = self._protocol()
        called = [n for n in LAYER_GETTERS if self.table.find(protocol, n)]
        for name in LAYER_GETTERS:
            found = self.table.find(cls, name)
            if found and called and name not in called:
                yield (
                    f"{found.location}: {name} is never called; this release calls {called[0]}, "
                    "so that the override has no effect"
                )

    def fix(self, export: Export) -> str | None:
        """Inheriting the protocol is enough where its methods have bodies that unwrap a model."""
        setter = self.table.find(self._protocol(), SETTER)
        if setter is None or is_stub(setter.node):
            return None
        bases = ", ".join(ast.unparse(b) for b in export.definitions[0].node.bases)
        return f"class {export.definitions[0].name}({bases}, {PROTOCOL}):"

    def _protocol(self) -> ClassDefinition:
        symbols = self.index.import_symbols(f"{self.models_module}.interfaces", PROTOCOL)
        for symbol in symbols:
            if isinstance(symbol, ClassDefinition):
                return symbol
        version = self.index.tree.version or "release"
        raise AuditError(
            f"{self.index.tree.path}: vLLM {version} has no {PROTOCOL} in {self.models}/"
            "interfaces.py; it predates the interface"
        )

    def _registry_module(self) -> Module:
        module = self.index.get(f"{self.models_module}.registry")
        if module is None:
            raise AuditError(f"{self.index.tree.path}: {self.models}/registry.py cannot be read")
        return module

    def _registry(self) -> Iterator[tuple[str, str, str, str]]:
        """Group, architecture, dotted module and class name of every entry."""
        for node in self._registry_module().tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            target = node.target if isinstance(node, ast.AnnAssign) else target
            table = getattr(node, "value", None)
            if not (isinstance(target, ast.Name) and isinstance(table, ast.Dict)):
                continue
            for key, value in zip(table.keys, table.values, strict=True):
                match key, value:
                    case (
                        ast.Constant(value=str(architecture)),
                        ast.Tuple(
                            elts=[ast.Constant(value=str(place)), ast.Constant(value=str(name))]
                        ),
                    ):
                        absolute = place.startswith(f"{self.package}.")
                        dotted = place if absolute else f"{self.models_module}.{place}"
                        yield target.id, architecture, dotted, name

    def _definitions(self, target: str, class_name: str) -> tuple[ClassDefinition, ...]:
        symbols = self.index.import_symbols(target, class_name)
        return tuple(s for s in symbols if isinstance(s, ClassDefinition))

    def _registered_model(self, _: FunctionValue, arguments: Arguments) -> Values:
        wanted = texts(arguments.get("architectures", frozenset()))
        found: set[Value] = {
            Instance(cls)
            for _, architecture, target, name in self._registry()
            if architecture in wanted
            for cls in self._definitions(target, name)
        }
        return frozenset(found or {Unknown(BY_CONFIG, is_model=True)})

    def _language_model(self, method: FunctionValue, _: Arguments) -> Values | None:
        """The protocol's default searches the children for one that embeds tokens."""
        receiver = method.receiver
        if not isinstance(receiver, Instance) or not method.module.name.endswith(".interfaces"):
            return None
        held = self.interpreter.attributes(receiver)
        for name in dict.fromkeys([*self.inner_attributes, *held]):
            for value in held.get(name, ()):
                if isinstance(value, Instance) and self.table.find(value.cls, "embed_input_ids"):
                    return held[name]
        return frozenset({Unknown(BY_CONFIG, is_model=True)})
