# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Top-k and top-p in Triton, exact and without sorting: where each row's logits are cut off.

The search is `sampling.largest_threshold`'s over bit patterns, three pivots a pass: two bits are
settled by reading the row once. bfloat16 has 16 bits to settle, others as fp32 32. Sums are taken
in one order, so that a row's result depends on nothing but the row.

Shape suffixes: B requests, T = B * N rows, V vocabulary, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs
from eyas.kernels.triton_numbers import order_value

_LEAST_MASS = tl.constexpr(1e-30)  # a top_p of 0 keeps the best token as well


@triton.jit
def _order(x):
    """int32 that orders as fp32 x does (NaN left out); both zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _largest_threshold(
    logits,
    want,
    least,
    scale,
    peak,
    VOCAB: tl.constexpr,
    MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest order such that the weights of logits of this order or above sum to `want`.

    Weights are 1, or exp((logit - peak) * scale) for MASS; those of orders below `least` are 0.
    (`logit * scale - peak * scale` may be one fused operation, which is not 0 for the best logit:
    at tiny temperatures far from it.)
    """
    low = tl.full((), -(1 << (31 - SHIFT)), tl.int32)
    width = tl.full((), 1 << (30 - SHIFT), tl.int32)
    number = tl.arange(0, BLOCK)
    for _ in range((32 - SHIFT) // 2):
        first = tl.zeros((BLOCK,), tl.float32)
        second = tl.zeros((BLOCK,), tl.float32)
        third = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            inside = start + number < VOCAB
            x = tl.load(logits + start + number, mask=inside, other=float("-inf")).to(tl.float32)
            order = _order(x) >> SHIFT
            weight = inside.to(tl.float32)
            if MASS:
                weight = tl.where(inside & (order >= least), tl.exp((x - peak) * scale), 0.0)
            first += tl.where(order >= low + width, weight, 0.0)
            second += tl.where(order >= low + 2 * width, weight, 0.0)
            third += tl.where(order >= low + 3 * width, weight, 0.0)
        reached = (tl.sum(first, axis=0) >= want).to(tl.int32)
        reached += (tl.sum(second, axis=0) >= want).to(tl.int32)
        reached += (tl.sum(third, axis=0) >= want).to(tl.int32)
        low += reached * width
        width = width // 4
    return low


@triton.jit
def _bounds_kernel(
    logits_TV,
    row_stride,
    slots_B,
    rows_a_slot,
    temperature_S,
    top_k_S,
    top_p_S,
    cut_T,
    peak_T,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_B + row // rows_a_slot)
    temperature = tl.load(temperature_S + slot)
    tl.store(cut_T + row, float("-inf"))
    tl.store(peak_T + row, 0.0)
    if temperature > 0:  # a greedy row keeps its best token whatever is cut
        logits = logits_TV + row.to(tl.int64) * row_stride
        number = tl.arange(0, BLOCK)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            inside = start + number < VOCAB
            x = tl.load(logits + start + number, mask=inside, other=float("-inf")).to(tl.float32)
            best = tl.maximum(best, x)
        peak = tl.max(best, axis=0)
        scale = tl.div_rn(1.0, temperature)
        tl.store(peak_T + row, peak)
        lowest = tl.full((), -(1 << (31 - SHIFT)), tl.int32)
        cut = lowest
        top_k = tl.load(top_k_S + slot)
        if top_k > 0:
            want = tl.minimum(top_k, VOCAB).to(tl.float32)
            cut = _largest_threshold(logits, want, lowest, scale, peak, VOCAB, False, SHIFT, BLOCK)
        top_p = tl.load(top_p_S + slot)
        if top_p < 1:
            total = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, VOCAB, BLOCK):
                inside = start + number < VOCAB
                x = tl.load(logits + start + number, mask=inside, other=float("-inf"))
                x = x.to(tl.float32)
                kept = inside & ((_order(x) >> SHIFT) >= cut)
                total += tl.where(kept, tl.exp((x - peak) * scale), 0.0)
            want = tl.maximum(top_p * tl.sum(total, axis=0), _LEAST_MASS)
            border = _largest_threshold(logits, want, cut, scale, peak, VOCAB, True, SHIFT, BLOCK)
            cut = tl.maximum(cut, border)
        value = order_value(cut << SHIFT)
        tl.store(cut_T + row, tl.where(value != value, float("-inf"), value))


def truncation_bounds(
    logits_TV: Tensor,
    slots_B: Tensor,
    *,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
) -> tuple[Tensor, Tensor]:
    """(the logit below which a row's tokens are cut, its best logit), fp32 [T] each.

    slots_B: T / B rows in a row belong to each slot. Top-k first, then top-p among what is left;
    ties at a border are kept. min-p follows from the second: exp((logit - best) / T) >= min_p.
    """
    num_rows, vocab_size = logits_TV.shape
    cut_T, peak_T = (torch.empty(num_rows, device=logits_TV.device) for _ in range(2))
    block = min(triton.next_power_of_2(vocab_size), 16384)
    _bounds_kernel[(num_rows,)](
        logits_TV,
        logits_TV.stride(0),
        slots_B,
        num_rows // len(slots_B),
        temperature_S,
        top_k_S,
        top_p_S,
        cut_T,
        peak_T,
        VOCAB=vocab_size,
        SHIFT=16 if logits_TV.dtype is torch.bfloat16 else 0,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 32),
        **launch_options(),
    )
    return cut_T, peak_T
