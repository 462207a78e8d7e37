"""What is sampled follows the target's exact distribution, with any draft tree (D9, trap 14).

A vocabulary of eight, ten thousand requests at once that differ in their seeds only, the joint
law of the first two tokens by chi-square. Mutants show that a wrong use of the noise is seen.
"""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from fixtures.chi_square import p_value
from fixtures.tiny import draft_config, full_forward, llama_config, tiny_draft, tiny_target
from torch import Tensor

from eyas.config import PLAIN, TreeShape
from eyas.contract.draft import Draft
from eyas.engine.worker import Worker, WorkerShape
from eyas.kernels import SamplingMode
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.llama import LlamaForCausalLM

VOCAB, START, NUM = 8, 5, 10_000
SHAPES = {
    "plain": PLAIN,
    "chain": TreeShape(2, 1, 3),
    "whole tree": TreeShape(2, 2, 7),
    "pruned tree": TreeShape(2, 3, 6),
}
CONFIG = llama_config(
    hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
    vocab_size=VOCAB,
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target(CONFIG, seed=3)


@pytest.fixture(scope="module")
def draft(target: LlamaForCausalLM) -> Eagle3Draft:
    """Knows five of the eight tokens."""
    decoder = dataclasses.replace(CONFIG, num_layers=1)
    config = draft_config(decoder, target_hidden_size=8, draft_vocab_size=5, boundaries=(0, 1, 2))
    return tiny_draft(target, config, seed=3)


@torch.inference_mode()
def joint_law(target: LlamaForCausalLM, temperature: float) -> Tensor:
    """p(first, second | START), flat [64]."""
    rows = []
    for token in range(VOCAB):
        output, _ = full_forward(target, [START, token])
        logits_TV = target.compute_logits(output.hidden_TH).double()
        first_V, second_V = (logits_TV / temperature).softmax(1)
        rows.append(first_V[token] * second_V)
    return torch.stack(rows).flatten()


Choose = Callable[..., Tensor]


@torch.inference_mode()
def sampled_pairs(
    target: LlamaForCausalLM,
    draft: Draft,
    tree: TreeShape,
    temperature: float,
    *,
    mutate: Callable[[Choose], Choose] | None = None,
) -> tuple[Tensor, float]:
    """(pairs first * 8 + second [NUM], share of requests whose second token came by acceptance).

    The state is set up by hand: nothing committed, START pending, two tokens to come.
    """
    shape = WorkerShape(num_slots=NUM, num_pages=NUM + 2, page_size=4, max_model_len=4, tree=tree)
    worker = Worker(
        target, draft, shape=shape, dtype=torch.float32, draft_dtype=torch.float32, device="cpu"
    )
    state, runner = worker.state, worker.runner
    state.page_table_SP[:NUM, 0] = torch.arange(NUM) + 2
    state.pending_S.fill_(START)
    state.remaining_S.fill_(2)
    state.active_S[:NUM] = True
    state.temperature_S.fill_(temperature)
    state.max_draft_S.fill_(100)
    state.seed_S.copy_(torch.arange(NUM + 1) * 7919 - 2**40)
    if mutate is not None:
        runner.sampler.choose = mutate(runner.sampler.choose)  # type: ignore[method-assign]
    mode = SamplingMode(noise=True)
    slots_B = torch.arange(NUM)
    if tree.depth:
        assert worker.proposer is not None
        worker.proposer.prime(slots_B, max_kv_len=4, mode=mode)
    pair_B, num_B = torch.zeros(NUM, dtype=torch.int64), torch.zeros(NUM, dtype=torch.int64)
    accepted = 0.0
    for number in range(2):
        packed = runner.round(slots_B, tree, max_kv_len=4, mode=mode).packed
        emitted_BE, num_emitted_B = packed[:, :-3], packed[:, -3]
        for step in range(emitted_BE.shape[1]):
            is_new_B = step < num_emitted_B
            pair_B = torch.where(is_new_B, pair_B * VOCAB + emitted_BE[:, step], pair_B)
        num_B += num_emitted_B
        if number == 0:
            accepted = (num_emitted_B == 2).float().mean().item()
    assert (num_B == 2).all() and not state.active_S.any()
    return pair_B, accepted


@functools.cache
def plain_pairs(target: LlamaForCausalLM, draft: Eagle3Draft, temperature: float) -> Tensor:
    return sampled_pairs(target, draft, PLAIN, temperature)[0]


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [("plain", 1.0), ("whole tree", 1.0)]
    + [(shape, t) for shape in ("chain", "pruned tree") for t in (0.5, 1.0, 2.0)],
)
def test_two_tokens_follow_their_joint_law(
    target: LlamaForCausalLM, draft: Eagle3Draft, shape: str, temperature: float
) -> None:
    pairs_B, accepted = sampled_pairs(target, draft, SHAPES[shape], temperature)
    plain_B = pairs_B if shape == "plain" else plain_pairs(target, draft, temperature)
    assert (pairs_B != plain_B).sum() <= 2  # the same one by one, but for rounding at a tie
    count = pairs_B.bincount(minlength=VOCAB**2)
    assert p_value(count, joint_law(target, temperature)) > 1e-3
    assert p_value(count, joint_law(target, temperature * 1.5)) < 1e-6  # it can fail
    if SHAPES[shape].depth:
        assert 0.2 < accepted < 0.9  # both ways of coming to the second token are there


def reuse_the_roots_noise(choose: Choose) -> Choose:
    """All nodes draw with the noise of the root's position."""

    def wrong(logits_TV: Tensor, slots_T: Tensor, position_T: Tensor, **kwargs: object) -> Tensor:
        tree = kwargs["tree"]
        return choose(logits_TV, slots_T, position_T - tree.depth_BN.flatten(), **kwargs)  # type: ignore[attr-defined]

    return wrong


def noise_of_another_row(choose: Choose) -> Choose:
    """Each row draws with the noise of the row before it."""

    def wrong(logits_TV: Tensor, slots_T: Tensor, position_T: Tensor, **kwargs: object) -> Tensor:
        return choose(logits_TV, slots_T.roll(1), position_T.roll(1), **kwargs)

    return wrong


@pytest.mark.parametrize("shape", ["chain", "pruned tree"])
@pytest.mark.parametrize("mutate", [reuse_the_roots_noise, noise_of_another_row])
def test_a_wrong_use_of_the_noise_is_seen(
    target: LlamaForCausalLM,
    draft: Eagle3Draft,
    shape: str,
    mutate: Callable[[Choose], Choose],
) -> None:
    pairs_B, _ = sampled_pairs(target, draft, SHAPES[shape], 1.0, mutate=mutate)
    count = pairs_B.bincount(minlength=VOCAB**2)
    assert p_value(count, joint_law(target, 1.0)) < 1e-6
