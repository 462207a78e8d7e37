"""Choices over a shared vocabulary are those over a whole one."""

import pytest
import torch
from fixtures.vocabulary_parts import on_each_rank
from torch import Tensor

from eyas.speculative.parts import best_of_parts, top_of_parts


def random_scores(vocab_size: int, *, ties: bool = False) -> Tensor:
    scores = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    return scores.round() if ties else scores


@pytest.mark.parametrize("vocab_size", [64, 61, 5])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("ties", [False, True])
def test_the_best(vocab_size: int, num_ranks: int, ties: bool) -> None:
    """Also where ranks have one id, or none."""
    scores_TV = random_scores(vocab_size, ties=ties)
    for chosen_T in on_each_rank(scores_TV, num_ranks, best_of_parts):
        assert chosen_T.tolist() == scores_TV.argmax(1).tolist()


@pytest.mark.parametrize(("vocab_size", "topk"), [(64, 3), (61, 8), (5, 4)])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_top(vocab_size: int, topk: int, num_ranks: int) -> None:
    scores_TV = random_scores(vocab_size)
    want = scores_TV.log_softmax(-1).topk(topk, dim=-1)
    found = on_each_rank(scores_TV, num_ranks, lambda s, part: top_of_parts(s, part, topk))
    for log_prob_TK, id_TK in found:
        assert torch.equal(id_TK, want.indices)
        torch.testing.assert_close(log_prob_TK, want.values)
        assert torch.equal(log_prob_TK, found[0][0])


def test_a_row_of_minus_infinity_has_an_id() -> None:
    scores_TV = torch.full((1, 6), float("-inf"))
    assert [t.tolist() for t in on_each_rank(scores_TV, 2, best_of_parts)] == [[0], [0]]


def test_half_precision_keeps_its_order() -> None:
    scores_TV = random_scores(64).to(torch.bfloat16)
    for chosen_T in on_each_rank(scores_TV, 4, best_of_parts):
        assert chosen_T.tolist() == scores_TV.argmax(1).tolist()
