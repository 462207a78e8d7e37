"""The round's steps in Triton are the torch ones, each by itself."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.cache.pool import TRASH_PAGE
from eyas.config import TreeShape
from eyas.contract.draft import DraftOutput
from eyas.kernels import SamplingMode
from eyas.speculative.simulate import SimulatedAcceptance
from eyas.speculative.state import NO_DRAFT_LIMIT, SlotState
from eyas.speculative.steps import RoundStart
from eyas.speculative.torch_steps import TorchSteps
from eyas.speculative.tree import Tree, TreeBuilder, tree_from_parents

pytestmark = pytest.mark.interpreter

QUICK = settings(
    derandomize=True,
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
)
NUM_SLOTS, NUM_PAGES, PAGE, VOCAB, HIDDEN = 5, 6, 4, 9, 6
POOL = SimpleNamespace(
    page_size=PAGE,
    trash_row=TRASH_PAGE * PAGE,
    num_page_rows=200,
    num_scratch_rows=64,
)
BACKEND: Any = SimpleNamespace(
    pool=POOL,
    scratch_rows=lambda slots_B, node_Q: 200 + slots_B[:, None] * 64 + node_Q[None, :],
)


def triton_steps(state: SlotState) -> Any:
    from eyas.speculative.triton_steps import TritonSteps

    return TritonSteps(state)


def random_state(generator: torch.Generator, topk: int = 1) -> SlotState:
    """Slots in the middle of their answers; the last is trash, and one is at rest."""

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    state = SlotState(
        num_slots=NUM_SLOTS,
        max_pages=NUM_PAGES,
        vocab_size=VOCAB,
        draft_hidden_size=HIDDEN,
        draft_dtype=torch.float32,
        topk=topk,
        device="cpu",
    )
    live = slice(0, NUM_SLOTS - 1)
    state.length_S[live] = numbers(1, PAGE * 2, NUM_SLOTS - 1)
    state.pending_S[live] = numbers(0, VOCAB, NUM_SLOTS - 1)
    state.remaining_S[live] = numbers(1, 9, NUM_SLOTS - 1)
    state.emitted_S[live] = numbers(0, 50, NUM_SLOTS - 1)
    state.active_S[live] = numbers(0, 4, NUM_SLOTS - 1) > 0
    state.seed_S[live] = numbers(-(2**62), 2**62, NUM_SLOTS - 1)
    state.temperature_S[live] = torch.tensor([0.0, 1.0, 0.5, 2.0])
    limits = torch.tensor([0, 1, 2, NO_DRAFT_LIMIT, NO_DRAFT_LIMIT, NO_DRAFT_LIMIT])
    state.max_draft_S[live] = limits[numbers(0, len(limits), NUM_SLOTS - 1)]
    state.stop_ids_SM[live, :2] = numbers(-1, VOCAB, NUM_SLOTS - 1, 2)
    pages = torch.randperm(NUM_SLOTS * NUM_PAGES, generator=generator) + TRASH_PAGE + 1
    state.page_table_SP[live] = pages.view(NUM_SLOTS, NUM_PAGES)[live]
    state.candidate_token_SK.copy_(numbers(0, VOCAB, NUM_SLOTS, topk))
    score_SK = -torch.rand(NUM_SLOTS, topk, generator=generator)
    state.candidate_score_SK.copy_(score_SK.sort(dim=1, descending=True).values)
    for hidden_SH in (state.draft_hidden_SH, state.draft_input_SH):
        hidden_SH.copy_(torch.randn(NUM_SLOTS, HIDDEN, generator=generator))
    return state


def assert_same_state(ours: SlotState, theirs: SlotState) -> None:
    for name, value in vars(ours).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, getattr(theirs, name)), name


def random_tree(generator: torch.Generator, num_requests: int, num_nodes: int) -> Tree:
    """Any shape; siblings have distinct tokens, as candidates do."""
    parents, tokens = [], []
    for _ in range(num_requests):
        parent, token, used = [-1], [0], set()
        for node in range(1, num_nodes):
            above = int(torch.randint(max(0, node - 3), node, (), generator=generator))
            left = [t for t in range(VOCAB) if (above, t) not in used]
            if not left:
                above = next(n for n in range(node) if (n, 0) not in used)
                left = [0]
            choice = left[int(torch.randint(0, len(left), (), generator=generator))]
            used.add((above, choice))
            parent.append(above)
            token.append(choice)
        parents.append(parent)
        tokens.append(token)
    return tree_from_parents(torch.tensor(tokens), torch.tensor(parents), num_nodes)


def likely_choices(generator: torch.Generator, tree: Tree) -> Tensor:
    """The target's choices, most of them one of the node's children."""
    chosen_BN = torch.randint(0, VOCAB, tree.token_BN.shape, generator=generator)
    for request, parent in enumerate(tree.parent_BN.tolist()):
        for node, above in enumerate(parent):
            if above >= 0 and torch.rand((), generator=generator) < 0.6:
                chosen_BN[request, above] = tree.token_BN[request, node]
    return chosen_BN


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


def torch_proposer(state: SlotState, draft: Any) -> Any:
    """A proposer that can only propose."""
    from eyas.speculative.proposer import Proposer

    proposer = Proposer.__new__(Proposer)
    proposer.state, proposer.draft = state, draft
    return proposer


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
