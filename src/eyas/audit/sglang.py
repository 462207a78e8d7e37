"""SGLang: a duck-typed interface, models exported by `EntryClass` in `srt/models/*.py`."""

import ast
import re
from typing import ClassVar

from eyas.audit.engines import Engine, Export, calls_with
from eyas.audit.modules import ClassDefinition, Problem
from eyas.audit.report import Member, Role
from eyas.audit.values import ClassValue, Collection, Frame, elements

DRAFT_NAME = re.compile(r"Eagle|NextN|MTP|Medusa|DFlash|DSpark|Draft|Assistant")
GENERATIVE_NAME = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|ChatModel)$")

INTERFACE = (
    Member(
        "get_embed_and_head",
        "required",
        "hands the embedding and head weights to the draft; called after both models are loaded",
    ),
    Member(
        "set_eagle3_layers_to_capture",
        "required",
        "says which layers to capture; called before CUDA graphs are captured",
        sets_layers=True,
    ),
    Member(
        "set_embed_and_head",
        "optional",
        "replaces the two weights; called where the class serves as a draft (MTP)",
    ),
    Member("get_input_embeddings", "optional", "read for input embeddings"),
    Member("lm_head", "optional", "read to share the head with a draft", is_method=False),
    Member("start_layer", "optional", "read with pipeline parallelism", is_method=False),
    Member("end_layer", "optional", "read with pipeline parallelism", is_method=False),
    *(
        Member(name, "context-parallel", "read with context parallelism", is_method=False)
        for name in ("capture_aux_hidden_states", "logits_processor", "pp_group", "model")
    ),
)


class SGLang(Engine):
    """SGLang's sources."""

    name: ClassVar[str] = "sglang"
    package: ClassVar[str] = "sglang"
    models: ClassVar[str] = "srt/models"

    def interface(self) -> tuple[Member, ...]:
        """What the engine calls on or reads from a target; nothing in SGLang declares it."""
        return INTERFACE

    def exports(self) -> list[Export]:
        """The classes that a module directly in the models folder names in `EntryClass`."""
        definitions: dict[str, list[ClassDefinition]] = {}
        for name in sorted(self.index.tree.modules):
            if name.rpartition(".")[0] != self.models_module:
                continue
            module = self.index.get(name)
            if module is None or module.is_package:  # SGLang imports no packages of the folder
                continue
            if not (module.bindings.get("EntryClass") or module.stars):
                continue
            values = self.interpreter.evaluate(ast.Name("EntryClass"), Frame(module))
            for value in values | elements(values):
                if isinstance(value, ClassValue):
                    definitions.setdefault(value.cls.name, []).append(value.cls)
                elif not isinstance(value, Collection) and module.bindings.get("EntryClass"):
                    message = f"EntryClass names something that cannot be followed: {value}"
                    self.unresolved.append(Problem(module.file, 0, message))
        return [
            Export(name, tuple(sorted(set(found), key=lambda c: c.location)), (name,))
            for name, found in sorted(definitions.items())
        ]

    def role(self, export: Export) -> tuple[Role, str]:
        """See "which classes count" in docs/contract.md."""
        cls = export.definitions[0]
        if found := DRAFT_NAME.search(export.name):
            return "draft", f'"{found.group()}" in its name'
        if calls_with(self.table, cls, "return_full_logits"):
            return "diffusion", "a diffusion model: LogitsProcessor(return_full_logits=True)"
        if self.is_full_model(cls):
            return "target", "makes logits (holds a LogitsProcessor)"
        if attribute := self._logits_attribute(cls, depth=3):
            return "target", f"its self.{attribute} makes logits"
        if not self.holds(cls, "Pooler") and (found := GENERATIVE_NAME.search(export.name)):
            return "target", f'its name ends in "{found.group()}"'
        return "not generative", "makes no logits (no LogitsProcessor, nor does a part of it)"

    def is_full_model(self, cls: ClassDefinition) -> bool:
        """Whether it holds a LogitsProcessor."""
        return self.holds(cls, "LogitsProcessor")

    def _logits_attribute(self, cls: ClassDefinition, *, depth: int) -> str | None:
        """The attribute whose model makes logits, looked for `depth` wrappers down."""
        for name, instances in self.inner_classes(cls).items() if depth else ():
            for inner in (i.cls for i in instances):
                if self.is_full_model(inner) or self._logits_attribute(inner, depth=depth - 1):
                    return name
        return None
