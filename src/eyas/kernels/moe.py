"""Matrix products of rows that belong to different experts, with shapes that no choice changes.

Rows are sorted by expert into blocks of one expert each. How many blocks there are at most follows
from the number of rows alone, so that a captured graph serves any choice; what a block holds past
its rows is computed and never read.

Shape suffixes: R rows, B blocks, M rows of a block, E experts, I in features, O out features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

MAX_BLOCK_ROWS = 64
MAX_GATHERED = 1 << 25  # elements of weights that are expanded at once


@dataclasses.dataclass(frozen=True)
class RowGroups:
    """Rows in blocks. expert_B: the expert of each block. source_BM: the row at each place (row 0
    where there is none). place_R: where each row lies among the B * M places. All int64."""

    expert_B: Tensor
    source_BM: Tensor
    place_R: Tensor


def block_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a block: about what an expert gets, a power of two."""
    mean = max(num_rows // num_experts, 1)
    return min(1 << (mean.bit_length() - 1), MAX_BLOCK_ROWS)


def num_blocks(num_rows: int, num_experts: int) -> int:
    """Blocks at most: each expert that has rows wastes at most a block but one row."""
    size = block_rows(num_rows, num_experts)
    return (num_rows + min(num_experts, num_rows) * (size - 1)) // size


def group_rows(expert_R: Tensor, *, num_experts: int) -> RowGroups:
    """Sort rows by their expert (int64 [R], 0 .. num_experts - 1)."""
    num_rows, device = len(expert_R), expert_R.device
    size = block_rows(num_rows, num_experts)
    sorted_R, order_R = expert_R.sort(stable=True)
    ones_R = torch.ones_like(expert_R)
    count_E = expert_R.new_zeros(num_experts).index_add_(0, expert_R, ones_R)
    padded_E = (count_E + (size - 1)) // size * size
    padded_end_E = padded_E.cumsum(0)
    # Places before an expert's first, less rows before its first.
    shift_E = (padded_end_E - padded_E) - (count_E.cumsum(0) - count_E)
    place_sorted_R = torch.arange(num_rows, device=device) + shift_E[sorted_R]
    place_R = torch.empty_like(place_sorted_R).index_copy_(0, order_R, place_sorted_R)
    most = num_blocks(num_rows, num_experts)
    source = expert_R.new_zeros(most * size).index_copy_(0, place_sorted_R, order_R)
    first_B = torch.arange(most, device=device) * size
    expert_B = torch.searchsorted(padded_end_E, first_B, right=True).clamp_(max=num_experts - 1)
    return RowGroups(expert_B, source.view(most, size), place_R)


def grouped_linear(
    x_BMI: Tensor, expert_B: Tensor, weights: Callable[[Tensor], Tensor], *, matrix_size: int
) -> Tensor:
    """[B, M, I] times each block's own matrix -> [B, M, O].

    weights: expert numbers [N] -> matrices [N, O, I] of matrix_size elements each; asked for a few
    blocks at a time, as each is a copy (and quantized ones are expanded).
    """
    step = max(MAX_GATHERED // matrix_size, 1)
    parts = [
        torch.bmm(x_NMI, weights(expert_N).transpose(1, 2))
        for x_NMI, expert_N in zip(
            torch.split(x_BMI, step), torch.split(expert_B, step), strict=True
        )
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
