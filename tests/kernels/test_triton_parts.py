"""The round's Triton kernels where ranks share the vocabulary: they choose as over all of it."""

from typing import Any

import pytest
import torch
from fixtures.vocabulary_parts import PlayedPart, on_each_rank
from torch import Tensor

pytestmark = pytest.mark.interpreter

VOCAB = 2 * 1024 + 5
STATE: dict[str, Any] = {
    "temperature_S": torch.tensor([1.0, 0.5, 0.0]),
    "seed_S": torch.tensor([5, -6, 7]),
}
SLOTS, POSITIONS = torch.tensor([1, 0, 2]), torch.tensor([10, 20, 30])


def random_logits() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(3, VOCAB, generator=generator) * 3).to(torch.bfloat16)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("noise", [False, True], ids=["greedy", "sampled"])
def test_the_choice(num_ranks: int, noise: bool) -> None:
    from eyas.kernels import triton_sampling

    def choose(logits_TV: Tensor, part: PlayedPart | None = None) -> Tensor:
        return triton_sampling.choose(
            logits_TV,
            SLOTS,
            POSITIONS,
            part=part,
            offset=1,
            min_p_S=torch.zeros(3),
            noise=noise,
            **STATE,
        )

    logits_TV = random_logits()
    for chosen_T in on_each_rank(logits_TV, num_ranks, choose):
        assert torch.equal(chosen_T, choose(logits_TV))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("topk", [1, 4])
def test_the_proposals(num_ranks: int, topk: int) -> None:
    from eyas.kernels import triton_draft

    ids_V = torch.arange(VOCAB) * 3 + 1

    def first_level(logits_TV: Tensor, part: PlayedPart | None = None) -> tuple[Tensor, Tensor]:
        proposals = triton_draft.propose(
            logits_TV, SLOTS, POSITIONS, ids_V, topk=topk, noise=True, part=part, **STATE
        )
        token_SK, score_SK = torch.full((3, topk), -1), torch.full((3, topk), 9.0)
        triton_draft.store_first_level(
            proposals,
            SLOTS,
            ids_V,
            torch.zeros(3, 8),
            candidate_token_SK=token_SK,
            candidate_score_SK=score_SK,
            draft_hidden_SH=torch.zeros(3, 8),
        )
        return token_SK, score_SK

    logits_TV = random_logits()
    want_token_SK, want_score_SK = first_level(logits_TV)
    for token_SK, score_SK in on_each_rank(logits_TV, num_ranks, first_level):
        assert torch.equal(token_SK, want_token_SK)
        torch.testing.assert_close(score_SK, want_score_SK, atol=2e-5, rtol=1e-5)
