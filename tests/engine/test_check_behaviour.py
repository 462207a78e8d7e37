"""The behavioural step sees every way of capturing the wrong state that a model may have."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fixtures.tiny import draft_config, llama_config
from torch import Tensor

from eyas.contract.attention import Attention
from eyas.contract.target import Target, TargetOutput, missing_members, wrapper_of
from eyas.engine.check_behaviour import report_behaviour
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.findings import Findings
from eyas.models.llama import LlamaForCausalLM

TARGET = llama_config(num_layers=5)
DRAFT = draft_config(boundaries=(1, 2, 5))


def problems(
    target_class: type, target: ModelConfig = TARGET, draft: DraftConfig | None = DRAFT
) -> list[str]:
    findings = Findings()
    report_behaviour(target_class, target, draft, findings)
    assert {finding.code for finding in findings} <= {"capture-wrong"}
    return [finding.message for finding in findings]


class Custom(LlamaForCausalLM):
    """A target whose way of capturing is to be changed."""

    def state(self, before_TH: Tensor, after_TH: Tensor, boundary: int) -> Tensor:
        """What is captured for a boundary: the stream before and after the block below it."""
        return after_TH

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> TargetOutput:
        stream, rotary = [self.model.embed_tokens(tokens_T)], self.rotary(positions_T)
        for block in self.model.layers:
            stream.append(block(stream[-1], rotary, attention))
        captured = [self.state(stream[max(b - 1, 0)], stream[b], b) for b in self._boundaries]
        features_TF = torch.cat(captured, dim=-1) if captured else None
        return TargetOutput(self.model.norm(stream[-1]), features_TF)


class WithoutResidual(Custom):
    def state(self, before_TH: Tensor, after_TH: Tensor, boundary: int) -> Tensor:
        return after_TH - before_TH if boundary else after_TH


class OneBelow(Custom):
    def state(self, before_TH: Tensor, after_TH: Tensor, boundary: int) -> Tensor:
        return before_TH


class LastOneBelow(Custom):
    def state(self, before_TH: Tensor, after_TH: Tensor, boundary: int) -> Tensor:
        return before_TH if boundary == self.num_layers else after_TH


class LastIsNormed(Custom):
    def state(self, before_TH: Tensor, after_TH: Tensor, boundary: int) -> Tensor:
        return self.model.norm(after_TH) if boundary == self.num_layers else after_TH


class OneAbove(LlamaForCausalLM):
    def set_eagle3_layers_to_capture(self, boundaries: Sequence[int]) -> None:
        self._boundaries = tuple(min(b + 1, self.num_layers) for b in boundaries)


class OneTooFew(LlamaForCausalLM):
    def set_eagle3_layers_to_capture(self, boundaries: Sequence[int]) -> None:
        self._boundaries = tuple(boundaries)[1:]


class HighestFirst(Custom):
    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> TargetOutput:
        output = super().forward(tokens_T, positions_T, attention)
        assert output.features_TF is not None
        states = output.features_TF.split(self.hidden_size, dim=1)
        return dataclasses.replace(output, features_TF=torch.cat(states[::-1], dim=1))


class Raises(LlamaForCausalLM):
    def forward(self, *_: Any) -> TargetOutput:
        raise AttributeError("no such thing")


FAULTS = [
    WithoutResidual,
    OneBelow,
    LastOneBelow,
    LastIsNormed,
    OneAbove,
    OneTooFew,
    HighestFirst,
    Raises,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_seen(fault: type) -> None:
    (problem,) = problems(fault)
    assert problem.startswith(fault.__name__)


@pytest.mark.parametrize("fault", [WithoutResidual, OneBelow, LastIsNormed, OneTooFew, Raises])
def test_without_a_draft_too(fault: type) -> None:
    assert len(problems(fault, draft=None)) == 1


@pytest.mark.parametrize("num_layers", [1, 2, 7, 61])
@pytest.mark.parametrize(
    "changes",
    [{}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}, {"qk_norm": True}]
    + [{"tie_word_embeddings": True}],
)
@pytest.mark.parametrize("target_class", [LlamaForCausalLM, Custom])
def test_right_targets_pass(num_layers: int, changes: dict[str, Any], target_class: type) -> None:
    target = llama_config(num_layers=num_layers, **changes)
    draft = dataclasses.replace(DRAFT, boundaries=(0, num_layers))
    assert problems(target_class, target, draft) == []
    assert problems(target_class, target, None) == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "norm_output": True, "fc_bias": True},
        {"has_embedding": True},
        {"has_head": False, "has_d2t": False, "draft_vocab_size": 64},
    ],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_right_drafts_pass(changes: dict[str, Any], is_tied: bool) -> None:
    draft = dataclasses.replace(DRAFT, **changes)
    decoder = dataclasses.replace(draft.decoder, tie_word_embeddings=is_tied)
    assert problems(LlamaForCausalLM, draft=dataclasses.replace(draft, decoder=decoder)) == []


def test_a_draft_that_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Eagle3Draft, "combine", lambda self, features_TF: features_TF[:, :3])
    assert len(problems(LlamaForCausalLM)) == 1


class Wrapper(wrapper_of("language_model"), torch.nn.Module):  # type: ignore[misc]
    """A wrapper in the layout of a vision model around a language model, as it should be."""

    def __init__(self, config: ModelConfig, **kwargs: Any) -> None:
        super().__init__()
        self.language_model = LlamaForCausalLM(config, **kwargs)


class BareWrapper(torch.nn.Module):
    """The same without any delegation."""

    def __init__(self, config: ModelConfig, **kwargs: Any) -> None:
        super().__init__()
        self.language_model = LlamaForCausalLM(config, **kwargs)


def test_a_wrapper_has_the_whole_interface() -> None:
    assert missing_members(Wrapper, Target) == ()
    assert problems(Wrapper) == []


def test_a_wrapper_without_delegation_lacks_all_of_it_at_once() -> None:
    missing = missing_members(BareWrapper, Target)
    assert {"get_embed_and_head", "set_eagle3_layers_to_capture"} <= set(missing)
    assert len(problems(BareWrapper)) == 1
