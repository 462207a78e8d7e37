"""Delegation is derived from the declaration: a wrapper cannot forget part of it (D4)."""

import inspect
from typing import Any, Protocol

import pytest
import torch
from fixtures.tiny import full_forward, tiny_draft, tiny_target
from torch import Tensor, nn

from eyas.contract.attention import Attention
from eyas.contract.draft import Draft
from eyas.contract.target import (
    Target,
    TargetOutput,
    interface_members,
    missing_members,
    wrapper_of,
)
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.llama import LlamaForCausalLM
from eyas.models.scripted import ScriptedDraft

MEMBERS = (
    "hidden_size",
    "vocab_size",
    "num_layers",
    "kv_layout",
    "captured_boundaries",
    "get_embed_and_head",
    "set_embed_and_head",
    "set_eagle3_layers_to_capture",
    "forward",
    "compute_logits",
    "compute_local_logits",
)


class VisionWrapper(wrapper_of("language_model"), nn.Module):  # type: ignore[misc]
    """As a vision-language model around a language model: defines nothing of the interface."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.language_model = inner


class Bare(nn.Module):
    """The same with its delegation forgotten."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.language_model = inner


def test_the_declaration_names_what_speculation_needs() -> None:
    assert set(MEMBERS) <= set(interface_members(Target))


@pytest.mark.parametrize("implementation", [LlamaForCausalLM, VisionWrapper])
def test_targets_have_every_member(implementation: type) -> None:
    assert missing_members(implementation) == ()
    for name in interface_members(Target):
        declared, own = vars(Target)[name], inspect.getattr_static(implementation, name)
        assert isinstance(own, property) == isinstance(declared, property), name


@pytest.mark.parametrize("implementation", [Eagle3Draft, ScriptedDraft])
def test_drafts_have_every_member(implementation: type) -> None:
    assert missing_members(implementation, Draft) == ()
    for name in interface_members(Draft):
        declared, own = vars(Draft)[name], inspect.getattr_static(implementation, name)
        if isinstance(declared, property):
            assert isinstance(own, property), name
            continue
        parameters = [list(inspect.signature(f).parameters) for f in (declared, own)]
        assert parameters[0] == parameters[1], name


def test_without_delegation_every_member_is_missing_at_once() -> None:
    """All by name and in one list: `forward` too, though nn.Module has a placeholder for it."""
    assert missing_members(Bare) == interface_members(Target)
    assert missing_members(object) == interface_members(Target)
    assert missing_members(object, Draft) == interface_members(Draft)


def test_a_wrapper_acts_as_what_it_wraps() -> None:
    inner = tiny_target()
    wrapper = VisionWrapper(inner)
    wrapper.set_eagle3_layers_to_capture((0, 2))
    assert inner.captured_boundaries == wrapper.captured_boundaries == (0, 2)
    assert wrapper.kv_layout == inner.kv_layout
    sizes = (wrapper.hidden_size, wrapper.vocab_size, wrapper.num_layers)
    assert sizes == (inner.hidden_size, inner.vocab_size, inner.num_layers)
    for own, theirs in zip(wrapper.get_embed_and_head(), inner.get_embed_and_head(), strict=True):
        assert own is theirs
    ours, _ = full_forward(wrapper, [1, 2, 3], (0, 2))
    theirs, _ = full_forward(inner, [1, 2, 3], (0, 2))
    assert torch.equal(ours.hidden_TH, theirs.hidden_TH)
    assert ours.features_TF is not None and theirs.features_TF is not None
    assert torch.equal(ours.features_TF, theirs.features_TF)
    logits = wrapper.compute_logits(ours.hidden_TH)
    assert torch.equal(logits, inner.compute_logits(ours.hidden_TH))
    embed_VH, head_VH = inner.get_embed_and_head()
    wrapper.set_embed_and_head(embed_VH * 2, head_VH * 2)
    assert torch.equal(inner.lm_head.weight, head_VH * 2)


def test_a_draft_shares_with_a_wrapper() -> None:
    wrapper = VisionWrapper(tiny_target())
    draft = tiny_draft(wrapper)
    assert draft.embed_tokens is not None
    assert draft.embed_tokens.weight.data_ptr() == wrapper.get_embed_and_head()[0].data_ptr()


def test_a_call_of_the_module_comes_to_the_inner_forward() -> None:
    """`wrapper(...)` goes through nn.Module's __call__, hence needs the delegated forward."""

    class Inner(nn.Module):
        def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> str:
            return f"inner {int(tokens_T)} {int(positions_T)} {attention}"

    one = torch.ones(1)
    assert VisionWrapper(Inner())(one, one * 2, attention="here") == "inner 1 2 here"


def test_a_wrappers_own_member_wins() -> None:
    class Own(VisionWrapper):
        @property
        def num_layers(self) -> int:
            return 99

        def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Any) -> TargetOutput:
            return self.language_model.forward(tokens_T + 1, positions_T, attention)

    inner = tiny_target()
    own = Own(inner)
    assert own.num_layers == 99 and own.vocab_size == inner.vocab_size
    shifted, _ = full_forward(own, [1, 2])
    plain, _ = full_forward(inner, [2, 3])
    assert torch.equal(shifted.hidden_TH, plain.hidden_TH)


def test_a_mixins_member_wins_too() -> None:
    class Mixin:
        def compute_logits(self, hidden_TH: Tensor) -> str:
            return "mixin"

    class Mixed(wrapper_of("language_model"), Mixin, nn.Module):  # type: ignore[misc]
        pass

    assert Mixed().compute_logits(torch.ones(1)) == "mixin"


def test_a_wrapper_of_a_wrapper_delegates_twice() -> None:
    class Outer(wrapper_of("inner"), nn.Module):  # type: ignore[misc]
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    target = tiny_target()
    outer = Outer(VisionWrapper(target))
    outer.set_eagle3_layers_to_capture((1,))
    assert target.captured_boundaries == (1,) and missing_members(Outer) == ()


def grown_interface() -> type:
    """A copy of the interface with a method and a property more."""
    members = {name: vars(Target)[name] for name in interface_members(Target)}

    def set_rope_offset(self: Any, offset: int, *, scale: float = 1.0) -> str:
        """New today."""
        raise NotImplementedError

    members["set_rope_offset"] = set_rope_offset
    members["image_token_id"] = property(lambda self: None, doc="Also new.")
    return type("GrownTarget", (), members)


def test_a_member_added_to_the_interface_is_delegated_the_same_day() -> None:
    interface = grown_interface()

    class Inner:
        image_token_id = 5

        def set_rope_offset(self, offset: int, *, scale: float = 1.0) -> str:
            return f"{offset} {scale}"

    class Grown(wrapper_of("language_model", interface), nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.language_model = Inner()

    assert missing_members(Grown, interface) == ()
    assert Grown().set_rope_offset(3, scale=0.5) == "3 0.5"
    assert Grown().image_token_id == 5
    assert vars(Grown)["set_rope_offset"].__doc__ == "New today."
    missing = missing_members(LlamaForCausalLM, interface)
    assert missing == ("set_rope_offset", "image_token_id")


def test_an_interface_that_extends_the_target_keeps_its_members() -> None:
    class Extended(Target, Protocol):
        def encode_image(self, image: Tensor) -> Tensor:
            """More than the target."""

    assert set(interface_members(Extended)) == {*interface_members(Target), "encode_image"}

    class Wrapper(wrapper_of("language_model", Extended), nn.Module):  # type: ignore[misc]
        pass

    assert missing_members(Wrapper, Extended) == ()


def test_declaring_the_protocol_as_a_base_implements_nothing() -> None:
    """A class may name Target as its base for the type checker; its stubs return None."""

    class Claims(Target):
        pass

    assert missing_members(Claims) == interface_members(Target)

    class Wrapper(wrapper_of("language_model"), nn.Module, Target):  # type: ignore[misc]
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.language_model = inner

    assert Wrapper(tiny_target()).vocab_size == 64


def test_an_absent_inner_member_is_an_error_that_names_it() -> None:
    wrapper = VisionWrapper(nn.Identity())
    with pytest.raises(AttributeError, match="get_embed_and_head"):
        wrapper.get_embed_and_head()
