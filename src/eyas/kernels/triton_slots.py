# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""What a request brings to its slot, written in one Triton launch from one packed row.

Shape suffixes: S slots, I integers, F floats, W words of the packed row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_slot_kernel(
    packed_W,
    numbers_I,
    floats_F,
    rows_R,
    widths_R,
    strides_R,
    NUM_NUMBERS: tl.constexpr,
    NUM_FLOATS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tensors come as tuples; a row table's values are as wide as its own elements."""
    slot = tl.load(packed_W)
    word = packed_W + 1
    for i in tl.static_range(NUM_NUMBERS):
        value = tl.load(word + i)
        tl.store(numbers_I[i] + slot, value.to(numbers_I[i].dtype.element_ty))
    word += NUM_NUMBERS
    for i in tl.static_range(NUM_FLOATS):
        tl.store(floats_F[i] + slot, tl.load(word + i).to(tl.int32).to(tl.float32, bitcast=True))
    word += NUM_FLOATS
    offset = tl.arange(0, BLOCK)
    for i in tl.static_range(NUM_ROWS):
        inside = offset < widths_R[i]
        value = tl.load(word + offset, mask=inside, other=0)
        target = rows_R[i] + slot * strides_R[i] + offset
        if rows_R[i].dtype.element_ty == tl.float32:
            tl.store(target, value.to(tl.int32).to(tl.float32, bitcast=True), mask=inside)
        else:
            tl.store(target, value, mask=inside)
        word += widths_R[i]


def write_slot(
    packed_W: Tensor,
    *,
    numbers: Sequence[Tensor],
    floats: Sequence[Tensor],
    rows: Sequence[Tensor],
) -> None:
    """Write a slot's part of tensors from int64 words: the slot, a word for each of `numbers`
    (int64 or int8 [S]) and of `floats` (fp32 [S], as their bits), and the rows of `rows` (int64 or
    fp32 [S, W])."""
    _write_slot_kernel[(1,)](
        packed_W,
        tuple(numbers),
        tuple(floats),
        tuple(rows),
        tuple(table.shape[1] for table in rows),
        tuple(table.stride(0) for table in rows),
        NUM_NUMBERS=len(numbers),
        NUM_FLOATS=len(floats),
        NUM_ROWS=len(rows),
        BLOCK=triton.next_power_of_2(max(table.shape[1] for table in rows)),
    )


def float_words(values: Sequence[float] | Tensor) -> Tensor:
    """The bits of numbers as fp32, int64."""
    return torch.as_tensor(values, dtype=torch.float32).view(torch.int32).to(torch.int64)
