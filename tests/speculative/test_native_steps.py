"""The round's steps in C are the torch ones: each by itself, and whole rounds."""

import copy
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.round_steps import (
    BACKEND,
    DRAFTS,
    HIDDEN,
    NUM_PAGES,
    NUM_SLOTS,
    ROUNDS,
    VOCAB,
    assert_same_rounds,
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
from eyas.kernels import SamplingMode, native, native_round, reference
from eyas.speculative import native_steps
from eyas.speculative.native_steps import BegunRound, NativeSteps, SettledRound
from eyas.speculative.steps import LastPairs
from eyas.speculative.torch_steps import TorchSteps
from eyas.speculative.tree import Tree

QUICK = settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
GREEDY = SamplingMode()


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    if not native.status().startswith("native"):
        pytest.skip(native.status())
    with torch.inference_mode():
        yield


@QUICK
@given(seed=st.integers(0, 2**30), num_nodes=st.integers(1, 12))
def test_settling(seed: int, num_nodes: int) -> None:
    """Acceptance, stops, limits, the slots' state, and where everything goes."""
    generator = torch.Generator().manual_seed(seed)
    ours = random_state(generator)
    theirs = copy.deepcopy(ours)
    trash = ours.trash_slot
    slots_B = torch.tensor([trash, 2, 0, trash, 3, 1])
    tree = random_tree(generator, len(slots_B), num_nodes)
    depth = int(tree.depth_BN.max())
    chosen_T = likely_choices(generator, tree).view(-1)
    shape: Any = SimpleNamespace(depth=depth, num_nodes=num_nodes, is_chain=False)
    settled, starts, made = [], [], (TorchSteps(theirs), NativeSteps(ours))
    for steps in made:
        starts.append(steps.begin(slots_B, shape))
        settled.append(
            steps.settle(
                starts[-1],
                tree,
                chosen_T,
                shape=shape,
                backend=BACKEND,
                mode=GREEDY,
                simulated=None,
            )
        )
    want, got = settled
    assert isinstance(starts[1], BegunRound) and isinstance(got, SettledRound)
    assert torch.equal(got.packed, want.packed)
    for name in ("emitted_BE", "row_T", "source_T", "destination_T"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name in ("position_T", "row_T", "page_T", "slots_B", "last_B"):
        assert torch.equal(getattr(got.entries, name), getattr(want.entries, name)), name
    assert torch.equal(got.entries.moved_B != 0, want.entries.moved_B)
    assert_same_state(ours, theirs)
    nothing = torch.zeros(len(slots_B), HIDDEN)
    pairs, after = (
        steps.last_pairs(start, one, nothing)
        for steps, start, one in zip(made, starts, settled, strict=True)
    )
    for name in ("token_B", "position_B", "length_B"):
        assert torch.equal(getattr(pairs, name), getattr(after, name)), name
    hidden_TH = torch.randn(len(got.entries.position_T), HIDDEN, generator=generator)
    kept, pages = [], []
    for steps, one in zip(made, settled, strict=True):
        page_end_PH = torch.zeros(NUM_SLOTS * NUM_PAGES + 2, HIDDEN)
        kept.append(steps.keep(hidden_TH, one.entries, page_end_PH))
        page_end_PH[TRASH_PAGE] = 0  # nobody reads it
        pages.append(page_end_PH)
    assert torch.equal(*kept)
    assert torch.equal(*pages)
    assert_same_state(ours, theirs)


@QUICK
@given(
    depth=st.integers(1, 6),
    seed=st.integers(0, 2**30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_growing(depth: int, seed: int, dtype: torch.dtype) -> None:
    """What the draft is asked at each level, and the chains that come of its answers."""
    generator = torch.Generator().manual_seed(seed)
    state, shape = random_state(generator), TreeShape(depth, 1, depth + 1)
    slots_B = torch.tensor([3, state.trash_slot, 0, 2])
    draft = SimpleNamespace(target_ids_V=torch.arange(0, 2 * VOCAB, 2))
    proposer: Any = torch_proposer(state, draft)
    both = TorchSteps(state), NativeSteps(state)
    starts = [steps.begin(slots_B, shape) for steps in both]
    want, got = (
        steps.grow(start, shape, mode=GREEDY, proposer=proposer)
        for steps, start in zip(both, starts, strict=True)
    )
    assert isinstance(got, native_steps.ChainGrowth)
    for name in ("length_B", "page_table_BP"):
        assert torch.equal(getattr(starts[1], name), getattr(starts[0], name)), name
    for _ in range(1, depth):
        for name in ("token_T", "position_T", "slots_T", "hidden_TH", "end_B"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert torch.equal(got.visible_rows(), want.visible_rows())
        logits_TV = torch.randn(len(slots_B), VOCAB, generator=generator).to(dtype)
        output = DraftOutput(logits_TV, torch.randn(len(slots_B), HIDDEN, generator=generator))
        want.advance(output)
        got.advance(output)
    theirs, ours = want.finish(), got.finish()
    for field in dataclasses.fields(Tree):
        assert torch.equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name
    length_B = starts[0].length_B
    assert torch.equal(ours.positions(length_B), theirs.positions(length_B))
    root, mine = (steps.root(steps.begin(slots_B, TreeShape(0, 1, 1))) for steps in both)
    assert torch.equal(root.token_BN, mine.token_BN)
    assert torch.equal(root.visible_BNN, mine.visible_BNN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_first_level_is_stored(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    ours = random_state(generator)
    theirs = copy.deepcopy(ours)
    slots_B = torch.tensor([2, ours.trash_slot, 0])
    output = DraftOutput(
        torch.randn(3, VOCAB, generator=generator).to(dtype),
        torch.randn(3, HIDDEN, generator=generator),
    )
    pairs = LastPairs(slots_B, *[slots_B] * 4, ours.page_table_SP, torch.ones(3, 1, 1))
    draft = SimpleNamespace(target_ids_V=torch.arange(0, 2 * VOCAB, 2))
    for make, state in ((TorchSteps, theirs), (NativeSteps, ours)):
        proposer: Any = torch_proposer(state, draft)
        make(state).first_level(output, pairs, mode=GREEDY, proposer=proposer)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_are_copied_in_all_layers(dtype: torch.dtype) -> None:
    pool = torch.randn(3, 20, 2, 5).to(dtype)
    expected, source_T = pool.clone(), torch.tensor([11, 12, 13, 14])
    destination_T = torch.tensor([5, 7, 1, 1])  # two to the trash row, 1
    reference.copy_kv_rows(expected, source_T[:2], destination_T[:2])
    native_round.copy_rows(pool, source_T, destination_T, trash_row=1)
    assert torch.equal(pool, expected)


def test_slots_that_were_replaced_are_seen() -> None:
    """A test or a copy may give a state other tensors; strided ones are left to torch."""
    state = random_state(torch.Generator().manual_seed(0))
    steps, slots_B, shape = NativeSteps(state), torch.tensor([1, 0]), TreeShape(2, 1, 3)
    before = steps.begin(slots_B, shape)
    state.length_S = state.length_S + 1
    after = steps.begin(slots_B, shape)
    assert isinstance(after, BegunRound)
    assert torch.equal(after.length_B, before.length_B + 1)
    state.length_S = torch.stack((state.length_S, state.length_S), dim=1)[:, 0]
    assert not isinstance(steps.begin(slots_B, shape), BegunRound)
    assert torch.equal(steps.begin(slots_B, shape).length_B, after.length_B)


@pytest.mark.parametrize("draft", list(DRAFTS))
@pytest.mark.parametrize("name", list(ROUNDS))
def test_whole_rounds(name: str, draft: str) -> None:
    """With padding in the batch, in every mode."""
    assert_same_rounds(NativeSteps, name, draft)


def test_switched_off_in_the_middle() -> None:
    """Rounds go on with torch operations where the library is switched off."""
    made: list[Tensor] = []

    class Sometimes(NativeSteps):
        def begin(self, *args: Any) -> Any:
            made.append(args[0])
            if len(made) % 2:
                return super().begin(*args)
            with native.disabled():
                return super().begin(*args)

    assert_same_rounds(Sometimes, "greedy chain", "lucky")
    assert len(made) >= 3
