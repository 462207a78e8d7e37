"""The joint law of accepted tokens is the target's own, exactly: chi-square on 8 tokens.

Whole rounds (draft, tree, choice, walk, cut, next round's state) over a target and a draft that are
tables; the expected law is a sum in Python. More than 100,000 seeds each; the draft knows five of
the eight tokens. tests/speculative/test_mutants.py shows that wrong rules fail here.
"""

import dataclasses

import pytest
import torch
from fixtures.device import DEVICE
from fixtures.markov import BATCH, STOPS, V, exact_law, first_tokens, fit
from torch import Tensor

from eyas.config import PLAIN, TreeShape
from eyas.speculative.proposer import Proposer
from eyas.types import SamplingParams

CHAIN, TREE, DEEP = TreeShape(2, 1, 3), TreeShape(2, 2, 6), TreeShape(3, 2, 5)

PARAMS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.5": SamplingParams(temperature=0.5),
    "temperature 1.7": SamplingParams(temperature=1.7),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=-1.2),
    "repetition": SamplingParams(repetition_penalty=1.6),
    "logit bias": SamplingParams(logit_bias={2: 1.5, 4: -1.0, 7: -100.0}, temperature=0.8),
    "min_tokens": SamplingParams(min_tokens=2, stop_token_ids=STOPS),
    "stop tokens": SamplingParams(stop_token_ids=STOPS),
    "top-k": SamplingParams(top_k=3),
    "top-p": SamplingParams(top_p=0.75, temperature=1.3),
    "min-p": SamplingParams(min_p=0.15, temperature=1.2),
}
EVERYTHING = SamplingParams(
    temperature=1.1,
    top_k=6,
    top_p=0.93,
    min_p=0.04,
    presence_penalty=0.5,
    frequency_penalty=0.6,
    repetition_penalty=1.3,
    logit_bias={3: 1.0, 1: 0.7},
    min_tokens=2,
    stop_token_ids=STOPS,
)
# Truncation is slow on rows of 8 values: fewer rows.
SHAPE_OF = {name: CHAIN if name in ("top-k", "top-p", "min-p") else TREE for name in PARAMS}


# These put another method in the place of the proposal.
IN_TORCH = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU proposes inside a kernel")


@pytest.mark.parametrize("name", list(PARAMS))
def test_the_joint_law_of_two_tokens(name: str) -> None:
    result = fit(PARAMS[name], SHAPE_OF[name])
    assert result.num_impossible == 0
    assert result.p > 1e-3
    assert 0.1 < result.accepted < SHAPE_OF[name].depth - 0.3  # the second token is drafted, often


@pytest.mark.parametrize("shape", [CHAIN, DEEP], ids=["chain", "pruned tree"])
def test_the_joint_law_under_every_option_at_once(shape: TreeShape) -> None:
    result = fit(EVERYTHING, shape)
    assert result.num_impossible == 0
    assert result.p > 1e-3
    assert result.accepted > 0.2


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, DEEP], ids=["plain", "chain", "pruned tree"])
def test_the_joint_law_of_three_tokens(shape: TreeShape) -> None:
    """min_tokens 3, one token emitted already: no stop among the next two, then as ever."""
    params = SamplingParams(
        temperature=0.9, frequency_penalty=0.8, min_tokens=3, stop_token_ids=STOPS
    )
    result = fit(params, shape, num_steps=3)
    assert result.num_impossible == 0 and result.p > 1e-3


def test_every_shape_says_the_same() -> None:
    """Not only the law is equal: so is each answer, under every option (D9)."""
    seeds = torch.arange(300) - 150
    for params in [*PARAMS.values(), EVERYTHING]:
        plain, accepted = first_tokens(params, PLAIN, num_steps=6, seeds=seeds)
        assert accepted == 0
        for shape in (CHAIN, TREE, TreeShape(4, 3, 12)):
            tokens, accepted = first_tokens(params, shape, num_steps=6, seeds=seeds)
            assert torch.equal(tokens, plain)
            assert accepted > 0.1


@IN_TORCH
def test_any_proposal_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates and scores that have nothing to do with the draft change the speed alone."""
    generator = torch.Generator().manual_seed(0)

    def anything(
        self: Proposer, logits: object, slots_T: Tensor, position_T: Tensor, **_: object
    ) -> tuple[Tensor, Tensor]:
        order = torch.rand(len(slots_T), V, generator=generator).argsort(1)[:, :2]
        score = -torch.rand(len(slots_T), 2, generator=generator)
        return order, score.sort(dim=1, descending=True).values

    plain, _ = first_tokens(EVERYTHING, PLAIN, num_steps=6, seeds=torch.arange(2000))
    monkeypatch.setattr(Proposer, "propose", anything)
    tokens, accepted = first_tokens(EVERYTHING, DEEP, num_steps=6, seeds=torch.arange(2000))
    assert torch.equal(tokens, plain)
    assert 0.05 < accepted < 0.5


def test_greedy_is_the_limit_of_small_temperatures() -> None:
    seeds = torch.arange(500)
    greedy = dataclasses.replace(EVERYTHING, temperature=0.0)
    expected, _ = first_tokens(greedy, TREE, num_steps=6, seeds=seeds)
    assert (expected == expected[0]).all()
    for temperature in (1e-3, 1e-6, 1e-20, 1e-30, 1e-38, 1e-40, 1e-50):
        cold = dataclasses.replace(EVERYTHING, temperature=temperature)
        tokens, _ = first_tokens(cold, TREE, num_steps=6, seeds=seeds)
        assert torch.equal(tokens, expected)


@IN_TORCH
def test_shared_noise_accepts_more_than_independent_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point of D9; the law is the same either way."""
    params, seeds = SamplingParams(temperature=1.0), torch.arange(BATCH)
    plain, _ = first_tokens(params, PLAIN, num_steps=3, seeds=seeds)
    _, shared = first_tokens(params, TREE, num_steps=3, seeds=seeds)
    propose = Proposer.propose

    def other_noise(
        self: Proposer, logits_TV: Tensor, slots_T: Tensor, position_T: Tensor, **settings: object
    ) -> tuple[Tensor, Tensor]:
        return propose(self, logits_TV, slots_T, position_T + 1000, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Proposer, "propose", other_noise)
    tokens, independent = first_tokens(params, TREE, num_steps=3, seeds=seeds)
    assert torch.equal(tokens, plain)
    assert shared > 1.2 * independent


def test_the_laws_differ_from_one_another() -> None:
    """The options do something here: no two of the laws are near each other."""
    laws = [exact_law(p, 2) for p in [*PARAMS.values(), EVERYTHING]]
    for number, one in enumerate(laws):
        for other in laws[:number]:
            assert (one - other).abs().sum() > 0.05  # twice the total variation
