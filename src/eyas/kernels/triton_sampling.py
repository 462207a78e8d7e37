# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""The target's choice y = argmax(logits / T + G) over a vocabulary, in Triton (design D9).

Shape suffixes: B requests, T = B * N rows, V vocabulary, S slots, C blocks of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.contract.target import Vocabulary
from eyas.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs
from eyas.kernels.triton_numbers import LOWEST_KEY, best_key, gumbel, key_index, noise_keys

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def block_size(num_rows: int) -> int:
    """Elements a program takes: small blocks where few rows would leave the device idle."""
    return 1024 if num_rows <= 16 else 4096


@triton.jit
def _noise_kernel(
    seed_R,
    position_R,
    token_V,
    out_RV,
    num_tokens,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = number < num_tokens
    key_a, key_b = noise_keys(tl.load(seed_R + row), tl.load(position_R + row))
    token = tl.load(token_V + number, mask=inside, other=0)
    tl.store(out_RV + row * num_tokens + number, gumbel(key_a, key_b, token), mask=inside)


def gumbel_noise(seed_R: Tensor, position_R: Tensor, token_V: Tensor) -> Tensor:
    """`reference.gumbel_noise`: what the other kernels add, written out."""
    num_rows, num_tokens = len(seed_R), len(token_V)
    out_RV = torch.empty(num_rows, num_tokens, device=seed_R.device)
    grid = (num_rows, triton.cdiv(num_tokens, 1024))
    _noise_kernel[grid](
        seed_R, position_R, token_V, out_RV, num_tokens, BLOCK=1024, **launch_options()
    )
    return out_RV


@triton.jit
def _choose_kernel(
    logits_TV,
    row_stride,
    slots_B,
    position_T,
    temperature_S,
    seed_S,
    cut_T,
    peak_T,
    min_p_S,
    key_TC,
    vocab_size,
    first_token,
    rows_a_slot,
    offset,
    NOISE: tl.constexpr,
    TRUNCATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best key of one block of one row."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row, block = tl.program_id(0), tl.program_id(1)
    number = block * BLOCK + tl.arange(0, BLOCK)
    inside, token = number < vocab_size, number + first_token
    start = logits_TV + row.to(tl.int64) * row_stride
    score = tl.load(start + number, mask=inside, other=float("-inf")).to(tl.float32)
    if NOISE:
        slot = tl.load(slots_B + row // rows_a_slot)
        temperature = tl.load(temperature_S + slot)
        if temperature > 0:
            kept, scale = inside, tl.div_rn(1.0, temperature)
            if TRUNCATE:
                kept &= score >= tl.load(cut_T + row)
                least = tl.load(min_p_S + slot)
                kept &= tl.exp((score - tl.load(peak_T + row)) * scale) >= least
            score *= scale
            position = tl.load(position_T + row) + offset
            key_a, key_b = noise_keys(tl.load(seed_S + slot), position)
            score += gumbel(key_a, key_b, token)
            if TRUNCATE:
                score = tl.where(kept, score, float("-inf"))
    best = best_key(score, token, inside)
    tl.store(key_TC + row * tl.num_programs(1) + block, best)


@triton.jit
def _best_kernel(
    key_TC,
    chosen_T,
    num_blocks,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    key = tl.load(key_TC + row * num_blocks + block, mask=block < num_blocks, other=LOWEST_KEY)
    tl.store(chosen_T + row, key_index(tl.max(key, axis=0)).to(tl.int64))


def choose(
    logits_TV: Tensor,
    slots_B: Tensor,
    position_T: Tensor,
    *,
    offset: int,
    temperature_S: Tensor,
    seed_S: Tensor,
    min_p_S: Tensor,
    noise: bool,
    bounds: tuple[Tensor, Tensor] | None = None,
    part: Vocabulary | None = None,
) -> Tensor:
    """The token of each row, int64 [T]; the lowest id of equals.

    slots_B: T / B rows in a row belong to each slot. position_T + offset: where the
    chosen tokens will be, which the noise depends on. bounds: of
    `triton_truncate.truncation_bounds`, where rows may be truncated. part: of which ids the logits
    are, where ranks share them; each block's best are gathered then.
    """
    num_rows, vocab_size = logits_TV.shape
    block = block_size(num_rows)
    num_blocks = triton.cdiv(vocab_size if part is None else part.widest, block)
    key_TC = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits_TV.device)
    chosen_T = torch.empty(num_rows, dtype=torch.int64, device=logits_TV.device)
    cut_T, peak_T = bounds or (temperature_S, temperature_S)
    _choose_kernel[(num_rows, num_blocks)](
        logits_TV,
        logits_TV.stride(0),
        slots_B,
        position_T,
        temperature_S,
        seed_S,
        cut_T,
        peak_T,
        min_p_S,
        key_TC,
        vocab_size,
        0 if part is None else part.first,
        num_rows // len(slots_B),
        offset,
        NOISE=noise,
        TRUNCATE=noise and bounds is not None,
        BLOCK=block,
        **launch_options(),
    )
    if part is not None:
        key_TC = part.join(key_TC)
        num_blocks = key_TC.shape[1]
    _best_kernel[(num_rows,)](
        key_TC,
        chosen_T,
        num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1,
        **launch_options(),
    )
    return chosen_T
