"""Every registered target has the whole interface; Kimi-K2.5's wrapper has it by naming its inner
model, and what a wrapper gets wrong is told before any weight is read."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.kimi_k25 import LATENT_DRAFT, write_kimi
from fixtures.mixtures import deepseek_config, latent_decoder, qwen_config
from fixtures.tiny import draft_config, llama_config
from torch import nn

from eyas.config import EngineConfig
from eyas.contract.target import Target, interface_members, missing_members
from eyas.engine import check
from eyas.engine.check_behaviour import report_behaviour
from eyas.models import kimi_k25
from eyas.models.config import ModelConfig
from eyas.models.deepseek_v3 import DeepseekV3ForCausalLM
from eyas.models.findings import Findings
from eyas.models.kimi_k25 import KimiK25ForConditionalGeneration
from eyas.models.registry import TARGETS, target_class
from eyas.types import Severity


def config_of(architecture: str) -> ModelConfig:
    if "Deepseek" in architecture or "Kimi" in architecture:
        return deepseek_config()
    return qwen_config() if "Moe" in architecture else llama_config()


@pytest.mark.parametrize("architecture", list(TARGETS))
def test_every_target_has_every_member(architecture: str) -> None:
    model_class: Any = target_class(architecture)
    assert missing_members(model_class) == ()
    model = model_class(config_of(architecture), dtype=torch.bfloat16, device="meta")
    model.set_eagle3_layers_to_capture((0, 2, 4))
    assert model.captured_boundaries == (0, 2, 4)
    assert model.kv_layout.num_layers == model.num_layers == 4
    embed_VH, head_VH = model.get_embed_and_head()
    assert embed_VH.is_meta and embed_VH.shape == head_VH.shape == (64, model.hidden_size)


@pytest.mark.parametrize("architecture", list(TARGETS))
@pytest.mark.parametrize("has_latent_draft", [False, True])
def test_every_target_captures_what_it_should(architecture: str, has_latent_draft: bool) -> None:
    findings = Findings()
    draft = draft_config(latent_decoder()) if has_latent_draft else draft_config()
    report_behaviour(target_class(architecture), config_of(architecture), draft, findings)
    assert findings == []


class Undelegated(nn.Module):
    """Kimi-K2.5's wrapper with its base class forgotten."""

    def __init__(self, config: ModelConfig, **kwargs: Any) -> None:
        super().__init__()
        self.language_model = DeepseekV3ForCausalLM(config, **kwargs)


def test_without_delegation_every_member_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kimi(tmp_path, LATENT_DRAFT)
    monkeypatch.setattr(check, "target_class", lambda _: Undelegated)
    config = EngineConfig(model=str(tmp_path / "target"), draft=str(tmp_path / "draft"))
    (finding,) = check.run_check(config).of(Severity.ERROR)
    assert finding.code == "interface-members-missing"
    assert finding.message == f"Undelegated lacks {', '.join(interface_members(Target))}"


def test_the_wrapper_names_its_inner_model_and_nothing_else() -> None:
    own = {name for name in vars(KimiK25ForConditionalGeneration) if not name.startswith("_")}
    # Beside the vision tower, which the inner model knows nothing of.
    assert own == {"stored_names", "encode_image", *interface_members(Target)}
    # All of these came by delegation: none is written in the module.
    source = Path(kimi_k25.__file__).read_text()
    assert not [name for name in interface_members(Target) if f"def {name}" in source]


def test_a_new_member_of_the_interface_is_delegated(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_rope_offset(self: Any, offset: int) -> str:
        """New today."""
        raise NotImplementedError

    monkeypatch.setattr(Target, "set_rope_offset", set_rope_offset, raising=False)
    assert missing_members(DeepseekV3ForCausalLM) == ("set_rope_offset",)
    spec = importlib.util.spec_from_file_location("kimi_of_tomorrow", kimi_k25.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wrapper_class = module.KimiK25ForConditionalGeneration
    assert missing_members(wrapper_class) == ()
    monkeypatch.setattr(
        DeepseekV3ForCausalLM, "set_rope_offset", lambda self, n: f"to {n}", raising=False
    )
    wrapper = wrapper_class(deepseek_config(), dtype=torch.float32, device="meta")
    assert wrapper.set_rope_offset(3) == "to 3"


class SetsItsOwnList(KimiK25ForConditionalGeneration):
    """Keeps the boundaries on the wrapper, where the inner model never looks."""

    def set_eagle3_layers_to_capture(self, boundaries: Sequence[int]) -> None:
        self.layers_to_capture = tuple(boundaries)


class SetsAnotherModule(KimiK25ForConditionalGeneration):
    """Sets a list on the decoder instead of the language model, which reads its own."""

    def set_eagle3_layers_to_capture(self, boundaries: Sequence[int]) -> None:
        self.language_model.model._boundaries = tuple(boundaries)


class PassesOnOne(KimiK25ForConditionalGeneration):
    """Counts as another engine does: one layer above."""

    def set_eagle3_layers_to_capture(self, boundaries: Sequence[int]) -> None:
        last = self.num_layers
        self.language_model.set_eagle3_layers_to_capture([min(b + 1, last) for b in boundaries])


@pytest.mark.parametrize("wrapper", [SetsItsOwnList, SetsAnotherModule, PassesOnOne])
def test_a_list_that_the_inner_model_never_reads_is_caught(wrapper: type) -> None:
    assert missing_members(wrapper) == ()  # the interface is all there
    for draft in (None, draft_config(latent_decoder(), boundaries=(1, 2, 3))):
        findings = Findings()
        report_behaviour(wrapper, deepseek_config(num_layers=5), draft, findings)
        assert [finding.code for finding in findings] == ["capture-wrong"]
