"""vLLM: the protocol of the release itself, the registry, inner models by architecture."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from eyas.audit import AuditError, AuditReport, ClassReport, audit

NEW_PROTOCOL = """
    from typing import ClassVar, Protocol

    class EagleModelMixin:
        aux_hidden_state_layers = ()
        def _set_aux_hidden_state_layers(self, layers):
            self.aux_hidden_state_layers = layers
        def _maybe_add_hidden_state(self, states, number, hidden):
            if number in self.aux_hidden_state_layers:
                states.append(hidden)

    class SupportsEagleBase(Protocol):
        has_own_lm_head: bool = False

    class SupportsEagle3(SupportsEagleBase, Protocol):
        supports_eagle3: ClassVar[bool] = True

        def set_aux_hidden_state_layers(self, layers):
            '''Sets the layers.'''
            parent = self
            if hasattr(self, "get_language_model"):
                parent = self.get_language_model()
            elif hasattr(self, "language_model"):
                parent = self.language_model
            getattr(parent, "model", parent)._set_aux_hidden_state_layers(layers)

        def get_eagle3_default_aux_hidden_state_layers(self):
            return (2, 3, 4)

    class SupportsMultiModal(Protocol):
        def get_language_model(self):
            for child in self.children():
                return child
"""
OLD_PROTOCOL = """
    from typing import ClassVar, Protocol

    class EagleModelMixin: pass
    class SupportsMultiModal(Protocol): pass

    class SupportsEagle3(Protocol):
        supports_eagle3: ClassVar[bool] = True
        def set_aux_hidden_state_layers(self, layers):
            '''Sets the layers.'''
            ...
        def get_eagle3_aux_hidden_state_layers(self):
            '''Gets the layers.'''
            ...
"""
REGISTRY = """
    _TEXT_GENERATION_MODELS = {
        "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
        "CwmForCausalLM": ("llama", "LlamaForCausalLM"),
        "PlainForCausalLM": ("llama", "PlainForCausalLM"),
    }
    _EMBEDDING_MODELS = {"BertModel": ("llama", "BertModel")}
    _MULTIMODAL_MODELS = {
        "TestedForConditionalGeneration": ("tested", "TestedForConditionalGeneration"),
    }
    _SPECULATIVE_DECODING_MODELS = {"EagleLlama": ("llama", "EagleLlama")}
    _LIMITS = {"LlamaForCausalLM": 3}
    _VLLM_MODELS = {**_TEXT_GENERATION_MODELS, **_MULTIMODAL_MODELS}
"""
LLAMA = """
    from torch import nn
    from .interfaces import EagleModelMixin, SupportsEagle3

    class LlamaModel(nn.Module, EagleModelMixin):
        def forward(self, hidden):
            for number, layer in enumerate(self.layers):
                self._maybe_add_hidden_state([], number, hidden)
    class PlainModel(nn.Module):
        def forward(self, hidden): return hidden
    class PlainForCausalLM(nn.Module):
        def __init__(self, *, vllm_config): self.model = PlainModel()
        def embed_input_ids(self, ids): return ids
        def compute_logits(self, hidden): return hidden
    class LlamaForCausalLM(PlainForCausalLM, SupportsEagle3):
        def __init__(self, *, vllm_config): self.model = LlamaModel()
    class EagleLlama(LlamaForCausalLM): pass
    class BertModel(nn.Module): pass
"""
TESTED = """
    from torch import nn
    from .interfaces import SupportsEagle3, SupportsMultiModal
    from .llama import LlamaForCausalLM, LlamaModel, PlainForCausalLM, PlainModel
    from .utils import init_vllm_registered_model

    class TestedForConditionalGeneration(nn.Module, SupportsMultiModal{bases}):
        def __init__(self, *, vllm_config):
            with self._mark_language_model(vllm_config):
                self.language_model = {inner}
        def compute_logits(self, hidden): return self.language_model.compute_logits(hidden)
        {more}
"""
UTILS = """
    def init_vllm_registered_model(vllm_config, *, hf_config=None, architectures=None):
        return initialize_model(vllm_config.with_hf_config(hf_config, architectures))
"""
BY_NAME = 'init_vllm_registered_model(vllm_config, architectures=["{}"])'


@pytest.fixture
def vllm(tmp_path: Path) -> Callable[..., AuditReport]:
    """Audits a package with one multimodal wrapper, whose parts the keywords set."""

    def run(
        *,
        bases: str = "",
        inner: str = BY_NAME.format("LlamaForCausalLM"),
        more: str = "pass",
        protocol: str = NEW_PROTOCOL,
        registry: str = REGISTRY,
    ) -> AuditReport:
        models = tmp_path / "vllm/model_executor/models"
        models.mkdir(parents=True, exist_ok=True)
        files = {
            "interfaces": protocol,
            "registry": registry,
            "llama": LLAMA,
            "utils": UTILS,
            "tested": TESTED.format(bases=bases, inner=inner, more=more),
        }
        for name, text in files.items():
            (models / f"{name}.py").write_text(dedent(text))
        return audit(tmp_path, "vllm")

    return run


def wrapper(report: AuditReport) -> ClassReport:
    (cls,) = [c for c in report.classes if c.name.startswith("Tested")]
    return cls


def test_the_interface_is_read_from_the_release(vllm):
    assert {m.name for m in vllm().interface} == {
        "has_own_lm_head",
        "supports_eagle3",
        "set_aux_hidden_state_layers",
        "get_eagle3_default_aux_hidden_state_layers",
    }
    old = vllm(protocol=OLD_PROTOCOL).interface
    assert [(m.name, m.is_method) for m in old] == [
        ("supports_eagle3", False),
        ("set_aux_hidden_state_layers", True),
        ("get_eagle3_aux_hidden_state_layers", True),
    ]


def test_a_release_without_the_protocol_is_an_error(vllm):
    with pytest.raises(AuditError, match="has no SupportsEagle3"):
        vllm(protocol="class SupportsLoRA: pass")


def test_the_registry_names_the_classes(vllm):
    report = vllm()
    assert {c.name: c.role for c in report.classes} == {
        "BertModel": "not generative",
        "EagleLlama": "draft",
        "LlamaForCausalLM": "target",
        "PlainForCausalLM": "target",
        "TestedForConditionalGeneration": "target",
    }
    (llama,) = [c for c in report.classes if c.name == "LlamaForCausalLM"]
    assert llama.architectures == ("CwmForCausalLM", "LlamaForCausalLM")
    assert llama.verdict == "complete"


def test_a_registry_entry_that_leads_nowhere_is_a_finding(vllm):
    report = vllm(registry=REGISTRY.replace('"llama", "BertModel"', '"lost", "BertModel"'))
    assert [f.kind for f in report.file_findings] == ["unreadable"]
    assert "BertModel" in report.problems[0].message


def test_a_wrapper_gap_is_one_finding_that_a_base_closes(vllm):
    cls = wrapper(vllm())
    assert [f.id for f in cls.findings] == ["TestedForConditionalGeneration:SupportsEagle3:missing"]
    assert cls.findings[0].in_inner
    assert [f.source for f in cls.fixes] == [
        "class TestedForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsEagle3):"
    ]
    closed = wrapper(vllm(bases=", SupportsEagle3"))
    assert closed.verdict == "complete"
    assert {e.verdict for e in closed.effects} == {"captures", "works"}


def test_an_older_protocol_has_no_bodies_to_inherit(vllm):
    inner = "OwnForCausalLM()"
    own = """
    class OwnForCausalLM(PlainForCausalLM, SupportsEagle3):
        def __init__(self): self.model = LlamaModel()
        def set_aux_hidden_state_layers(self, layers): self.model.layers = layers
        def get_eagle3_aux_hidden_state_layers(self): return (1, 2, 3)
    """
    cls = wrapper(vllm(protocol=OLD_PROTOCOL, inner=inner, more=f"pass\n{own}"))
    assert [f.member for f in cls.fixes] == [
        "supports_eagle3",
        "set_aux_hidden_state_layers",
        "get_eagle3_aux_hidden_state_layers",
    ]
    inherited = wrapper(vllm(protocol=OLD_PROTOCOL, bases=", SupportsEagle3"))
    assert [f.kind for f in inherited.findings] == ["stub", "stub"]


@pytest.mark.parametrize(
    ("inner", "kind"),
    [
        (BY_NAME.format("PlainForCausalLM"), "broken-delegation"),
        ("PlainForCausalLM(vllm_config=vllm_config)", "broken-delegation"),
        ("LlamaForCausalLM(vllm_config=vllm_config)", None),
    ],
)
def test_the_decoder_must_be_able_to_capture(vllm, inner, kind):
    findings = wrapper(vllm(bases=", SupportsEagle3", inner=inner)).findings
    assert [f.kind for f in findings] == ([kind] if kind else [])


def test_an_inner_model_by_config_is_left_open(vllm):
    inner = "init_vllm_registered_model(vllm_config, hf_config=vllm_config.text)"
    without = wrapper(vllm(inner=inner))
    assert without.inner.classes == ()
    assert [f.in_inner for f in without.findings] == [False]
    having = wrapper(vllm(inner=inner, bases=", SupportsEagle3"))
    assert (having.verdict, having.findings) == ("undecided", ())


def test_a_method_that_this_release_never_calls_is_noted(vllm):
    more = "def get_eagle3_aux_hidden_state_layers(self): return (1, 2, 3)"
    cls = wrapper(vllm(bases=", SupportsEagle3", more=more))
    (note,) = cls.notes
    assert "get_eagle3_aux_hidden_state_layers is never called" in note
    assert cls.findings == ()
