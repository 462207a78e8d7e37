"""Choices over a vocabulary that ranks share: each rank's best (value, id) pairs are gathered, and
every rank chooses among the same bytes (D12).

Shape suffixes: T rows, V ids of this rank, K candidates a row, G ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.contract.target import Vocabulary


def best_of_parts(scores_TV: Tensor, part: Vocabulary) -> Tensor:
    """The id of each row's best score, int64 [T]; the lowest one of equals."""
    value_TC, id_TC = _gather_best(scores_TV, part, 1)
    return id_TC.gather(1, value_TC.argmax(1, keepdim=True))[:, 0]


def top_of_parts(scores_TV: Tensor, part: Vocabulary, topk: int) -> tuple[Tensor, Tensor]:
    """(the log-probabilities of each row's best ids [T, K] fp32, the ids int64), best first."""
    value_TC, id_TC = _gather_best(scores_TV, part, topk)
    # A softmax's total from each rank's own.
    totals_TG = part.join(scores_TV.logsumexp(-1, keepdim=True))
    value_TC, order_TC = value_TC.sort(dim=1, descending=True, stable=True)
    id_TK = id_TC.gather(1, order_TC[:, :topk])
    return value_TC[:, :topk] - totals_TG.logsumexp(-1, keepdim=True), id_TK


def _gather_best(scores_TV: Tensor, part: Vocabulary, topk: int) -> tuple[Tensor, Tensor]:
    """The best scores of every rank, fp32, and their ids, int64; both [T, G * K]."""
    num_rows, num_here = scores_TV.shape
    value_TK = scores_TV.new_full((num_rows, topk), float("-inf"), dtype=torch.float32)
    id_TK = torch.full_like(value_TK, part.first, dtype=torch.int32)
    if topk == 1 and num_here:
        best_T1, index_T1 = scores_TV.max(-1, keepdim=True)
        value_TK, id_TK = best_T1.float(), (index_T1 + part.first).to(torch.int32)
    elif num_here:  # a rank may have fewer ids than candidates are asked for, or none
        best, index = scores_TV.topk(min(topk, num_here), dim=-1)
        value_TK[:, : best.shape[1]] = best
        id_TK[:, : best.shape[1]] = index + part.first
    pairs = part.join(torch.cat((value_TK, id_TK.view(torch.float32)), dim=1))
    pairs = pairs.view(num_rows, -1, 2, topk)
    ids = pairs[:, :, 1].contiguous().view(torch.int32)
    return pairs[:, :, 0].flatten(1), ids.flatten(1).to(torch.int64)
