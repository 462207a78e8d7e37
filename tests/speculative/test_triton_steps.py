"""The round's steps in Triton are the torch ones, each by itself."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.round_steps import (
    BACKEND,
    HIDDEN,
    NUM_PAGES,
    NUM_SLOTS,
    VOCAB,
    assert_same_state,
    likely_choices,
    random_state,
    random_tree,
    torch_proposer,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.cache.pool import TRASH_PAGE
from eyas.config import TreeShape
from eyas.contract.draft import DraftOutput
from eyas.kernels import SamplingMode
from eyas.speculative.simulate import SimulatedAcceptance
from eyas.speculative.state import SlotState
from eyas.speculative.steps import RoundStart
from eyas.speculative.torch_steps import TorchSteps
from eyas.speculative.tree import Tree, TreeBuilder

pytestmark = pytest.mark.interpreter

QUICK = settings(
    derandomize=True,
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
)


def triton_steps(state: SlotState) -> Any:
    from eyas.speculative.triton_steps import TritonSteps

    return TritonSteps(state)


@QUICK
@given(
    seed=st.integers(0, 2**30),
    num_nodes=st.integers(1, 12),
    rates=st.none() | st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=11, max_size=11),
    penalize=st.booleans(),
)
def test_settling(seed: int, num_nodes: int, rates: list[float] | None, penalize: bool) -> None:
    """Acceptance, stops, limits, the slots' state, and where everything goes."""
    generator = torch.Generator().manual_seed(seed)
    ours = random_state(generator)
    theirs = copy.deepcopy(ours)
    trash = ours.trash_slot
    slots_B = torch.tensor([trash, 2, 0, trash, 3, 1])
    tree = random_tree(generator, len(slots_B), num_nodes)
    depth = int(tree.depth_BN.max())
    chosen_T = likely_choices(generator, tree).view(-1)
    simulated = None if rates is None else SimulatedAcceptance(tuple(rates), device="cpu")
    settled = []
    for make, state in ((TorchSteps, theirs), (triton_steps, ours)):
        steps: Any = make(state)
        shape: Any = SimpleNamespace(depth=depth, num_nodes=num_nodes, is_chain=False)
        start = RoundStart(
            slots_B, state.length_S[slots_B], state.page_table_SP.index_select(0, slots_B)
        )
        settled.append(
            steps.settle(
                start,
                tree,
                chosen_T,
                shape=shape,
                backend=BACKEND,
                mode=SamplingMode(penalize=penalize),
                simulated=simulated,
            )
        )
    want, got = settled
    assert torch.equal(got.packed, want.packed)
    for name in ("emitted_BE", "row_T", "source_T", "destination_T"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name in ("position_T", "row_T", "page_T", "slots_B", "last_B"):
        assert torch.equal(getattr(got.entries, name), getattr(want.entries, name)), name
    assert torch.equal(got.entries.moved_B != 0, want.entries.moved_B)
    assert_same_state(ours, theirs)
    pairs = triton_steps(ours).last_pairs(start, got, torch.zeros(len(slots_B), HIDDEN))
    after = TorchSteps(theirs).last_pairs(start, want, torch.zeros(0))
    for name in ("token_B", "position_B", "length_B"):
        assert torch.equal(getattr(pairs, name), getattr(after, name)), name
    check_keeping(generator, (ours, got.entries), (theirs, want.entries))


def check_keeping(generator: torch.Generator, *sides: tuple[SlotState, Any]) -> None:
    """s of rows that end pages and of the slots' last rows."""
    num_rows = len(sides[0][1].position_T)
    hidden_TH = torch.randn(num_rows, HIDDEN, generator=generator)
    kept, pages = [], []
    for make, (state, entries) in zip((triton_steps, TorchSteps), sides, strict=True):
        page_end_PH = torch.zeros(NUM_SLOTS * NUM_PAGES + 2, HIDDEN)
        kept.append(make(state).keep(hidden_TH, entries, page_end_PH))
        page_end_PH[TRASH_PAGE] = 0  # nobody reads it
        pages.append(page_end_PH)
    assert torch.equal(*kept)
    assert torch.equal(*pages)
    assert_same_state(sides[0][0], sides[1][0])


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    depth, topk = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    if topk == 1:
        return TreeShape(depth, 1, depth + 1)
    most = 1 + topk + (depth - 1) * topk**2
    return TreeShape(depth, topk, draw(st.integers(depth + 1, min(most, 40))))


@QUICK
@given(shape=shapes(), seed=st.integers(0, 2**30), noise=st.booleans())
def test_growing(shape: TreeShape, seed: int, noise: bool) -> None:
    """What the draft is asked at each level, and the trees that come of its answers."""
    generator = torch.Generator().manual_seed(seed)
    state = random_state(generator, topk=shape.topk)
    slots_B = torch.tensor([3, state.trash_slot, 0, 2])
    mode = SamplingMode(noise=noise)
    ids_V = torch.arange(0, 2 * VOCAB, 2)
    draft = SimpleNamespace(target_ids_V=ids_V)
    growths, starts = [], []
    for make in (TorchSteps, triton_steps):
        steps: Any = make(state)
        proposer: Any = torch_proposer(state, draft)
        starts.append(steps.begin(slots_B, shape))
        growths.append(steps.grow(starts[-1], shape, mode=mode, proposer=proposer))
    want, got = growths
    for name in ("length_B", "page_table_BP"):
        assert torch.equal(getattr(starts[1], name), getattr(starts[0], name)), name
    for _ in range(1, shape.depth):
        for name in ("token_T", "position_T", "slots_T", "hidden_TH", "end_B"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert torch.equal(got.visible_rows(), want.visible_rows())
        num_rows = len(want.token_T)
        output = DraftOutput(
            torch.randn(num_rows, VOCAB, generator=generator) * 2,
            torch.randn(num_rows, HIDDEN, generator=generator),
        )
        want.advance(output)
        got.advance(output)
    theirs, ours = want.finish(), got.finish()
    for field in dataclasses.fields(Tree):
        assert torch.equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name
    length_B = starts[0].length_B
    assert torch.equal(ours.positions(length_B), theirs.positions(length_B))


@QUICK
@given(shape=shapes().filter(lambda s: s.topk > 1), data=st.data())
def test_pruning_with_ties(shape: TreeShape, data: st.DataObject) -> None:
    """Equal scores keep the order of appearance, as the stable sort does."""
    from eyas.kernels import triton_tree

    num_requests, topk = 2, shape.topk
    seed = data.draw(st.integers(0, 2**30))
    generator = torch.Generator().manual_seed(seed)

    def level(num_parents: int) -> tuple[Tensor, Tensor]:
        size = (num_requests, num_parents, topk)
        score = -torch.randint(0, 3, size, generator=generator).float() / 2
        token = torch.randint(0, 1000, size, generator=generator)
        return token, score.sort(dim=2, descending=True).values

    token, score = level(1)
    builder = TreeBuilder(shape, token[:, 0], score[:, 0])
    for _ in range(1, shape.depth):
        builder.advance(*level(topk), torch.zeros(num_requests, topk, 1))
    candidates = triton_tree.Candidates(
        torch.cat(builder._tokens, dim=1),
        torch.cat(builder._scores, dim=1),
        torch.cat(builder._parents, dim=1).to(torch.int32),
    )
    root_B, length_B = torch.tensor([5, 6]), torch.tensor([0, 70])
    want = builder.finish(root_B)
    got = triton_tree.finish(
        candidates, root_B, length_B, num_nodes=shape.num_nodes, depth=shape.depth
    )
    token_BN, parent_BN, depth_BN, position_BN, visible_BNN = got
    assert torch.equal(token_BN, want.token_BN)
    assert torch.equal(parent_BN, want.parent_BN)
    assert torch.equal(depth_BN, want.depth_BN)
    assert torch.equal(position_BN, want.depth_BN + length_B[:, None])
    assert torch.equal(visible_BNN, want.visible_BNN)
