"""Truncation and processors in Triton against torch's."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.kernels import sampling
from eyas.speculative.sampler import Sampler
from eyas.speculative.state import SlotSettings, SlotState
from eyas.speculative.tree import chain_tree, tree_from_parents
from eyas.types import SamplingParams

pytestmark = pytest.mark.interpreter

QUICK = settings(derandomize=True, deadline=None, max_examples=15)
VOCAB = 300


def kept(logits_TV: Tensor, temperature_T: Tensor, **limits: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens kept by the kernels' bounds, by torch), bool [T, V]."""
    from eyas.kernels import triton_truncate

    cut_T, peak_T = triton_truncate.truncation_bounds(
        logits_TV,
        torch.arange(len(logits_TV)),
        temperature_S=temperature_T,
        top_k_S=limits["top_k_R"],
        top_p_S=limits["top_p_R"],
    )
    scores_TV = logits_TV.float() / temperature_T[:, None]
    ours_TV = logits_TV.float() >= cut_T[:, None]
    below_TV = (logits_TV.float() - peak_T[:, None]) / temperature_T[:, None]
    ours_TV &= torch.exp(below_TV) >= limits["min_p_R"][:, None]
    theirs_TV = sampling.truncate(scores_TV, **limits) > float("-inf")
    return ours_TV & (scores_TV > float("-inf")), theirs_TV


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_rows_are_truncated_where_torch_truncates_them(dtype: torch.dtype, ties: bool) -> None:
    """Rows with each limit alone and all of them; borders through ties keep them all."""
    generator = torch.Generator().manual_seed(int(ties))
    logits_TV = torch.randn(9, VOCAB, generator=generator) * 3
    if ties:
        logits_TV = logits_TV.round()
    logits_TV = logits_TV.to(dtype)
    logits_TV[3, 40:] = float("-inf")
    logits_TV[8] = 0.0  # -0.0 among them
    logits_TV[8, 7] = -0.0
    ours_TV, theirs_TV = kept(
        logits_TV,
        torch.tensor([1.0, 0.5, 2.0, 1.0, 0.8, 1e-3, 1.0, 1.0, 1.0]),
        top_k_R=torch.tensor([5, 0, 0, 60, 20, 7, VOCAB + 9, 1, 3]),
        top_p_R=torch.tensor([1.0, 0.7, 1.0, 1.0, 0.4, 0.9, 0.999, 0.0, 0.5]),
        min_p_R=torch.tensor([0.0, 0.0, 0.12, 0.0, 0.05, 0.0, 0.0, 0.0, 0.0]),
    )
    assert torch.equal(ours_TV, theirs_TV)
    assert ours_TV.any(1).all()


def test_a_greedy_row_is_left_alone() -> None:
    from eyas.kernels import triton_truncate

    cut_T, _ = triton_truncate.truncation_bounds(
        torch.randn(2, 20),
        torch.arange(2),
        temperature_S=torch.tensor([0.0, 1.0]),
        top_k_S=torch.tensor([3, 0]),
        top_p_S=torch.tensor([0.5, 1.0]),
    )
    assert cut_T.tolist() == [float("-inf")] * 2


@QUICK
@given(
    seed=st.integers(0, 2**30),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.3, 0.6, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
)
def test_any_limits(seed: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    logits_TV = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 2
    ours_TV, theirs_TV = kept(
        logits_TV,
        torch.tensor([temperature]),
        top_k_R=torch.tensor([top_k]),
        top_p_R=torch.tensor([top_p]),
        min_p_R=torch.tensor([min_p]),
    )
    assert torch.equal(ours_TV, theirs_TV)


PENALTIES = SamplingParams(presence_penalty=0.7, frequency_penalty=-0.4, repetition_penalty=1.3)
BIASED = SamplingParams(min_tokens=6, logit_bias={0: 1.5, 8: -9.0, 17: 3.0, 299: 0.25})


@pytest.mark.parametrize("in_tree", [False, True], ids=["prefill", "tree"])
@pytest.mark.parametrize("penalize", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_processors(in_tree: bool, penalize: bool, bias: bool) -> None:
    """Slots with penalties, with biases, and with neither; drafted tokens count on their way."""
    from eyas.kernels import triton_process

    state = SlotState(
        num_slots=5,
        max_pages=2,
        vocab_size=VOCAB,
        draft_hidden_size=1,
        draft_dtype=torch.float32,
        topk=1,
        device="cpu",
    )
    for slot, params in enumerate((PENALTIES, BIASED, SamplingParams(), BIASED)):
        outputs = [8, 8, 4, 17][: slot + 1] * (2 if slot == 3 else 1)
        state.admit(slot, SlotSettings(params, 9, 1, [17, 5, 4000], [3, 17, 299], outputs))
    slots_B = torch.tensor([3, 0, 4, 1, 2])
    tree = chain_tree(slots_B[:, None])
    if in_tree:
        tokens = torch.tensor([[8, 5, 8, 9, 17], [1, 8, 8, 8, 2]] * 3)[:5]
        parents = torch.tensor([[-1, 0, 0, 2, 3], [-1, 0, 1, 2, 0]] * 3)[:5]
        tree = tree_from_parents(tokens, parents, 4)
    num_nodes = tree.token_BN.shape[1]
    logits_TV = torch.randn(5 * num_nodes, VOCAB, generator=torch.Generator().manual_seed(2))
    slots_T = slots_B.repeat_interleave(num_nodes)
    got_TV = triton_process.process(
        triton_process.ProcessorTensors.of(state),
        logits_TV,
        slots_B,
        penalize=penalize,
        bias=bias,
        tree=(tree.token_BN, tree.depth_BN, tree.visible_BNN) if in_tree else None,
    )
    want_TV = processed(state, logits_TV, slots_T, tree if in_tree else None, penalize, bias)
    torch.testing.assert_close(got_TV, want_TV, atol=1e-6, rtol=1e-6)
    assert bool((got_TV == float("-inf")).any()) == bias


def processed(
    state: SlotState, logits_TV: Tensor, slots_T: Tensor, tree: Any, penalize: bool, bias: bool
) -> Tensor:
    """As the sampler does it, up to the choice."""
    from eyas.speculative import sampler as module

    sampler = Sampler(state)
    if penalize:
        count_TV = state.output_count_SV[slots_T]
        if tree is not None:
            count_TV = count_TV + module._path_counts(tree, VOCAB)
        logits_TV = sampling.apply_penalties(
            logits_TV,
            count_RV=count_TV,
            prompt_RV=state.prompt_seen_SV[slots_T],
            presence_R=state.presence_S[slots_T],
            frequency_R=state.frequency_S[slots_T],
            repetition_R=state.repetition_S[slots_T],
        )
    return sampler._bias(logits_TV, slots_T, tree) if bias else logits_TV
