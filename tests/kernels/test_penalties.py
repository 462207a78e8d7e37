"""Penalties, bias and suppressed stop tokens per row, against a loop over tokens."""

import dataclasses
import math

import pytest
import torch
from fixtures.slow_sampling import best_two, noise_of, penalized, processed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas import kernels
from eyas.speculative.sampler import Sampler
from eyas.speculative.state import SlotSettings, SlotState, sampling_mode
from eyas.speculative.tree import Tree, chain_tree, tree_from_parents
from eyas.types import SamplingParams

V = 8
# A machine that pauses is no reason to fail.
QUICK = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow],
)
TOKENS = st.integers(0, V - 1)
LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=V, max_size=V)
PENALTY = st.sampled_from([0.0, 0.0, -2.0, -0.7, 0.4, 2.0])
REPETITION = st.sampled_from([1.0, 1.0, 0.01, 0.6, 1.3, 100.0])


@st.composite
def penalties(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        presence_penalty=draw(PENALTY),
        frequency_penalty=draw(PENALTY),
        repetition_penalty=draw(REPETITION),
    )


@QUICK
@given(
    rows=st.lists(
        st.tuples(LOGITS, penalties(), st.lists(TOKENS, max_size=9), st.lists(TOKENS, max_size=4)),
        min_size=1,
        max_size=4,
    ),
)
def test_apply_penalties(
    rows: list[tuple[list[float], SamplingParams, list[int], list[int]]],
) -> None:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(params, name) for _, params, _, _ in rows])

    got_RV = kernels.apply_penalties(
        torch.tensor([logits for logits, _, _, _ in rows]),
        count_RV=torch.tensor([[output.count(t) for t in range(V)] for _, _, output, _ in rows]),
        prompt_RV=torch.tensor([[t in prompt for t in range(V)] for _, _, _, prompt in rows]),
        presence_R=column("presence_penalty"),
        frequency_R=column("frequency_penalty"),
        repetition_R=column("repetition_penalty"),
    )
    for row, (logits, params, output, prompt) in enumerate(rows):
        want = penalized(logits, params, prompt=prompt, output=output)
        assert got_RV[row].tolist() == pytest.approx(want, rel=1e-5, abs=1e-4)


def test_a_repetition_penalty_lowers_both_signs() -> None:
    """Divided above zero, multiplied below: always less likely (Keskar et al., 2019)."""
    got = kernels.apply_penalties(
        torch.tensor([[2.0, -2.0, 2.0, -2.0]]),
        count_RV=torch.tensor([[1, 0, 0, 0]]),
        prompt_RV=torch.tensor([[False, True, False, False]]),
        presence_R=torch.zeros(1),
        frequency_R=torch.zeros(1),
        repetition_R=torch.tensor([2.0]),
    )
    assert got.tolist() == [[1.0, -4.0, 2.0, -2.0]]


def random_tree(data: st.DataObject, num_nodes: int) -> tuple[Tree, list[list[int]]]:
    """A tree, and the tokens from the root's child to each node."""
    parents = [-1] + [data.draw(st.integers(0, n - 1)) for n in range(1, num_nodes)]
    tokens = [data.draw(TOKENS) for _ in range(num_nodes)]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*paths[parent], tokens[node]] if node else [])
    return tree_from_parents(torch.tensor([tokens]), torch.tensor([parents]), num_nodes), paths


def slots(settings_: list[SlotSettings]) -> SlotState:
    state = SlotState(
        num_slots=len(settings_) + 1,
        max_pages=1,
        vocab_size=V,
        draft_hidden_size=1,
        draft_dtype=torch.float32,
        topk=1,
        device="cpu",
    )
    for slot, one in enumerate(settings_):
        state.admit(slot, one)
    return state


@st.composite
def all_options(draw: st.DrawFn) -> SamplingParams:
    return dataclasses.replace(
        draw(penalties()),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 2.0])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        logit_bias=draw(st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 2.0, 5.0]))),
        min_tokens=draw(st.integers(0, 8)),
        top_k=draw(st.sampled_from([0, 0, 1, 3])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.15])),
    )


@QUICK
@given(data=st.data(), num_nodes=st.integers(1, 7))
def test_each_row_of_a_tree_sees_the_tokens_on_its_way(data: st.DataObject, num_nodes: int) -> None:
    """Two requests with any options and histories; every node's choice, against plain decoding of
    the path to it. The noise is that of the row's own position."""
    given_, trees = [], []
    for _ in range(2):
        params = data.draw(all_options())
        prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=4))
        output = data.draw(st.lists(TOKENS, min_size=1, max_size=4))
        stop_ids = data.draw(st.lists(TOKENS, max_size=3, unique=True))
        assert params.seed is not None
        given_.append(SlotSettings(params, 9, params.seed, stop_ids, prompt, output))
        trees.append(random_tree(data, num_nodes))
    logits_TV = torch.tensor([data.draw(LOGITS) for _ in range(2 * num_nodes)])
    joined = [torch.cat([getattr(t, f.name) for t, _ in trees]) for f in dataclasses.fields(Tree)]
    tree = Tree(*joined)
    lengths = torch.tensor([len(s.prompt_token_ids) + len(s.output_token_ids) for s in given_])
    chosen_T = Sampler(slots(given_)).choose(
        logits_TV,
        torch.tensor([0, 1]).repeat_interleave(num_nodes),
        (lengths[:, None] + tree.depth_BN).flatten(),
        mode=sampling_mode(given_[0].params) | sampling_mode(given_[1].params),
        tree=tree,
    )
    for request, (one, (_, paths)) in enumerate(zip(given_, trees, strict=True)):
        for node, path in enumerate(paths):
            row, output = request * num_nodes + node, [*one.output_token_ids, *path]
            scores = processed(
                logits_TV[row].tolist(),
                one.params,
                prompt=one.prompt_token_ids,
                output=output,
                stop_ids=one.stop_ids,
            )
            position = len(one.prompt_token_ids) + len(output)
            noise = noise_of(one.params, position, V)
            token, lead = best_two(scores, noise)
            if lead > 1e-3 or math.isnan(lead):
                assert chosen_T[row] == token


COUNTED = SamplingParams(temperature=0, frequency_penalty=1.0, min_tokens=5)


@pytest.mark.parametrize("emitted", [[3], [3, 3, 5, 1], [1, 1, 2]])
def test_counts_move_by_what_is_emitted(emitted: list[int]) -> None:
    """Only the tokens kept, each as often as it came; neighbours and the trash slot stay."""
    settings_ = [SlotSettings(COUNTED, 9, 0, [5], [1, 2], [2, 4])] * 3
    state = slots(settings_)
    state.active_S[:3] = torch.tensor([True, True, False])
    before = state.output_count_SV.clone()
    block = emitted + [7] * (6 - len(emitted))
    num_B, _ = Sampler(state).emit(
        torch.tensor([1, 2, 3, 3]),  # a request, one that is done, and padding twice
        torch.tensor([block] * 4),
        torch.tensor([len(emitted) - 1] * 4),
        mode=sampling_mode(COUNTED),
    )
    kept = emitted[: emitted.index(5) + 1] if 5 in emitted else emitted
    assert num_B.tolist() == [len(kept), 0, 0, 0]
    for token in kept:
        before[1, token] += 1
    assert torch.equal(state.output_count_SV, before)
    assert state.emitted_S.tolist() == [2, 2 + len(kept), 2, 0]


def test_a_slot_starts_from_what_was_generated_before_a_preemption() -> None:
    state = slots([SlotSettings(COUNTED, 9, 0, [], [1, 2, 2], [2, 4, 4])])
    assert state.output_count_SV[0].tolist() == [0, 0, 1, 0, 2, 0, 0, 0]
    assert state.prompt_seen_SV[0].nonzero().flatten().tolist() == [1, 2]
    state.admit(0, SlotSettings(COUNTED, 9, 0, [], [3], []))
    assert not state.output_count_SV[0].any()
    assert state.prompt_seen_SV[0].nonzero().flatten().tolist() == [3]


def test_stop_tokens_outside_the_vocabulary_suppress_nothing() -> None:
    """An end token of a tokenizer with more tokens than the model has rows: it can never come."""
    params = SamplingParams(temperature=0, min_tokens=3)
    state = slots([SlotSettings(params, 9, 0, [V, 10_000, 2], [1], [1])])
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0, 0.0, 0.0, 0.0, 4.0]])
    tree = chain_tree(torch.tensor([[1]]))
    chosen = Sampler(state).choose(
        logits, torch.tensor([0]), torch.tensor([2]), mode=sampling_mode(params), tree=tree
    )
    assert chosen.tolist() == [7]
