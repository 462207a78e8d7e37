"""Wrong acceptance rules are caught: the tests of tests/speculative/test_joint_law.py can fail.

Each mutant replaces one piece of the rule in a way that still gives plausible text. The same
parameters, shape and seeds pass without it.
"""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from fixtures.markov import STOPS, fit
from torch import Tensor

from eyas import kernels
from eyas.config import TreeShape
from eyas.kernels import SamplingMode
from eyas.speculative import round as round_module
from eyas.speculative import sampler as sampler_module
from eyas.speculative.sampler import Sampler
from eyas.speculative.tree import Tree
from eyas.types import SamplingParams

CHAIN, TREE = TreeShape(2, 1, 3), TreeShape(2, 2, 6)
PLAUSIBLE, IMPOSSIBLE = 1e-3, 1e-9
NUM_BATCHES = 4  # 32,768 seeds are plenty to tell these apart
WARM = SamplingParams(temperature=1.0)
choose, walk_tree = Sampler.choose, kernels.walk_tree

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


@functools.cache
def sound(name: str) -> float:
    """p without any mutant."""
    params, shape, _ = MUTANTS[name]
    return fit(params, shape, num_batches=NUM_BATCHES).p


def replace_choose(
    patch: Patch, wrong: Callable[[Sampler, Tensor, Tensor, Tensor, SamplingMode, Tree], Tensor]
) -> None:
    """Put another choice of tokens in place."""

    def mutant(
        self: Sampler,
        logits_TV: Tensor,
        slots_T: Tensor,
        position_T: Tensor,
        *,
        mode: SamplingMode,
        tree: Tree,
    ) -> Tensor:
        return wrong(self, logits_TV, slots_T, position_T, mode, tree)

    patch.setattr(Sampler, "choose", mutant)


def wrong_row(patch: Patch) -> None:
    """Each node's choice is read from the row before it."""

    def wrong(
        self: Sampler,
        logits: Tensor,
        slots: Tensor,
        position: Tensor,
        mode: SamplingMode,
        tree: Tree,
    ) -> Tensor:
        chosen_T = choose(self, logits, slots, position, mode=mode, tree=tree)
        return chosen_T.view_as(tree.token_BN).roll(1, dims=1).flatten()

    replace_choose(patch, wrong)


def bonus_of_the_last_row(patch: Patch) -> None:
    """The bonus token is the choice at the last node instead of the last accepted one."""

    def wrong(
        token_BN: Tensor, parent_BN: Tensor, chosen_BN: Tensor, *, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        path_BE, emitted_BE, num_B = walk_tree(token_BN, parent_BN, chosen_BN, depth=depth)
        emitted_BE = emitted_BE.scatter(1, num_B[:, None], chosen_BN[:, -1:])
        return path_BE, emitted_BE, num_B

    patch.setattr(round_module.kernels, "walk_tree", wrong)


def the_draft_decides(patch: Patch) -> None:
    """The first child is accepted whatever the target says."""

    def wrong(
        token_BN: Tensor, parent_BN: Tensor, chosen_BN: Tensor, *, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        chosen_BN = chosen_BN.clone()
        chosen_BN[:, 0] = token_BN[:, 1]
        return walk_tree(token_BN, parent_BN, chosen_BN, depth=depth)

    patch.setattr(round_module.kernels, "walk_tree", wrong)


def noise_of_the_root(patch: Patch) -> None:
    """All rows of a round use the noise of the first position."""

    def wrong(
        self: Sampler,
        logits: Tensor,
        slots: Tensor,
        position: Tensor,
        mode: SamplingMode,
        tree: Tree,
    ) -> Tensor:
        position = position - tree.depth_BN.flatten()
        return choose(self, logits, slots, position, mode=mode, tree=tree)

    replace_choose(patch, wrong)


def noise_without_a_position(patch: Patch) -> None:
    """Each position of a request uses the same noise, in later rounds too."""

    def wrong(
        self: Sampler,
        logits: Tensor,
        slots: Tensor,
        position: Tensor,
        mode: SamplingMode,
        tree: Tree,
    ) -> Tensor:
        position = torch.full_like(position, 7)
        return choose(self, logits, slots, position, mode=mode, tree=tree)

    replace_choose(patch, wrong)


def no_noise_on_drafted_rows(patch: Patch) -> None:
    """Drafted rows are greedy."""

    def wrong(
        self: Sampler,
        logits: Tensor,
        slots: Tensor,
        position: Tensor,
        mode: SamplingMode,
        tree: Tree,
    ) -> Tensor:
        drafted_T = tree.depth_BN.flatten() > 0
        chosen_T = choose(self, logits, slots, position, mode=mode, tree=tree)
        return torch.where(drafted_T, logits.argmax(1), chosen_T)

    replace_choose(patch, wrong)


def skip_on_drafted_rows(**fields: bool) -> Mutant:
    """Drafted rows go without some processors."""

    def patched(patch: Patch) -> None:
        def wrong(
            self: Sampler,
            logits: Tensor,
            slots: Tensor,
            position: Tensor,
            mode: SamplingMode,
            tree: Tree,
        ) -> Tensor:
            drafted_T = tree.depth_BN.flatten() > 0
            less = dataclasses.replace(mode, **fields)
            without_T = choose(self, logits, slots, position, mode=less, tree=tree)
            with_T = choose(self, logits, slots, position, mode=mode, tree=tree)
            return torch.where(drafted_T, without_T, with_T)

        replace_choose(patch, wrong)

    return patched


def history_of_the_round_before(patch: Patch) -> None:
    """Counts and the number of emitted tokens are frozen at the round's start."""

    def wrong(
        self: Sampler,
        logits: Tensor,
        slots: Tensor,
        position: Tensor,
        mode: SamplingMode,
        tree: Tree,
    ) -> Tensor:
        return choose(self, logits, slots, position, mode=mode, tree=None)

    replace_choose(patch, wrong)


def counts_of_the_whole_tree(patch: Patch) -> None:
    """Siblings and their children count as if they had been emitted."""

    def wrong(tree: Tree, vocab_size: int) -> Tensor:
        everywhere = dataclasses.replace(tree, visible_BNN=torch.ones_like(tree.visible_BNN))
        return path_counts(everywhere, vocab_size)

    path_counts = sampler_module._path_counts
    patch.setattr(sampler_module, "_path_counts", wrong)


def counts_of_what_was_accepted(patch: Patch) -> None:
    """What a round emitted is not counted for the next one."""
    emit = Sampler.emit

    def wrong(self: Sampler, *args: Tensor, mode: SamplingMode) -> tuple[Tensor, Tensor]:
        return emit(self, *args, mode=dataclasses.replace(mode, penalize=False))

    patch.setattr(Sampler, "emit", wrong)


def one_row_too_few(patch: Patch) -> None:
    """min_tokens ends one token early on drafted rows."""

    def wrong(
        self: Sampler,
        logits: Tensor,
        slots: Tensor,
        position: Tensor,
        mode: SamplingMode,
        tree: Tree,
    ) -> Tensor:
        deeper = dataclasses.replace(tree, depth_BN=tree.depth_BN + (tree.depth_BN > 0))
        return choose(self, logits, slots, position, mode=mode, tree=deeper)

    replace_choose(patch, wrong)


REPEATS = SamplingParams(frequency_penalty=-1.5, presence_penalty=-1.0)
EARLY = SamplingParams(min_tokens=2, stop_token_ids=STOPS)
MUTANTS: dict[str, tuple[SamplingParams, TreeShape, Mutant]] = {
    "wrong row, chain": (WARM, CHAIN, wrong_row),
    "wrong row, tree": (WARM, TREE, wrong_row),
    "bonus of the last row": (WARM, TREE, bonus_of_the_last_row),
    "the draft decides": (WARM, CHAIN, the_draft_decides),
    "noise of the root, chain": (WARM, CHAIN, noise_of_the_root),
    "noise of the root, tree": (WARM, TREE, noise_of_the_root),
    "noise without a position": (WARM, CHAIN, noise_without_a_position),
    "greedy drafted rows": (WARM, TREE, no_noise_on_drafted_rows),
    "no top-k": (SamplingParams(top_k=3), CHAIN, skip_on_drafted_rows(truncate=False)),
    "no top-p": (SamplingParams(top_p=0.75), CHAIN, skip_on_drafted_rows(truncate=False)),
    "no min-p": (SamplingParams(min_p=0.15), CHAIN, skip_on_drafted_rows(truncate=False)),
    "no presence": (
        SamplingParams(presence_penalty=1.5),
        TREE,
        skip_on_drafted_rows(penalize=False),
    ),
    "no frequency": (
        SamplingParams(frequency_penalty=-1.2),
        TREE,
        skip_on_drafted_rows(penalize=False),
    ),
    "no repetition": (
        SamplingParams(repetition_penalty=1.6),
        TREE,
        skip_on_drafted_rows(penalize=False),
    ),
    "no logit bias": (
        SamplingParams(logit_bias={2: 1.5, 7: -3.0}),
        TREE,
        skip_on_drafted_rows(bias=False),
    ),
    "no min_tokens": (
        dataclasses.replace(EARLY, min_tokens=3),
        TREE,
        skip_on_drafted_rows(bias=False),
    ),
    "frozen history": (REPEATS, TREE, history_of_the_round_before),
    "min_tokens of the round's start": (
        EARLY,
        TREE,
        history_of_the_round_before,
    ),
    "min_tokens off by one": (dataclasses.replace(EARLY, min_tokens=3), TREE, one_row_too_few),
    "whole tree counted": (REPEATS, TREE, counts_of_the_whole_tree),
    "rounds not counted": (REPEATS, CHAIN, counts_of_what_was_accepted),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_mutant_does_not_fit_the_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sound(name) > PLAUSIBLE
    params, shape, mutate = MUTANTS[name]
    mutate(monkeypatch)
    assert fit(params, shape, num_batches=NUM_BATCHES).p < IMPOSSIBLE
