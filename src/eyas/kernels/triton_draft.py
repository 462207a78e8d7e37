# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""What a draft proposes, and the tree that grows from it, in Triton.

`speculative.proposer` and `speculative.tree` describe the procedure; this computes the same, with
the lowest index first among equal scores.

A level is two launches: the best candidates of each block of the vocabulary, then one program a
request that joins the blocks and moves to the next beams.

Shape suffixes: B requests, K topk, T = B * K rows, V draft vocabulary, H draft hidden,
C blocks of the vocabulary, A candidates so far, N nodes, R draft rows, S slots.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.contract.target import Vocabulary
from eyas.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs
from eyas.kernels.triton_numbers import (
    LOWEST_KEY,
    best_key,
    gumbel,
    key_index,
    key_value,
    make_key,
    noise_keys,
)
from eyas.kernels.triton_sampling import block_size

MAX_TOPK = 16


@dataclasses.dataclass(frozen=True)
class Proposals:
    """The best candidates by block: key_TCK int64 (value, draft id); peak_TC and total_TC: each
    block's largest score and sum of exp(score - peak)."""

    key_TCK: Tensor
    peak_TC: Tensor
    total_TC: Tensor

    @property
    def num_keys(self) -> int:
        """Keys a row."""
        return self.key_TCK.shape[1] * self.key_TCK.shape[2]


@triton.jit
def _propose_kernel(
    logits_TV,
    row_stride,
    slots_T,
    position_T,
    temperature_S,
    seed_S,
    target_id_V,
    key_TCK,
    peak_TC,
    total_TC,
    vocab_size,
    first,
    TOPK: tl.constexpr,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row, block = tl.program_id(0), tl.program_id(1)
    number = block * BLOCK + tl.arange(0, BLOCK)
    inside = number < vocab_size
    start = logits_TV + row.to(tl.int64) * row_stride
    score = tl.load(start + number, mask=inside, other=float("-inf")).to(tl.float32)
    if NOISE:
        slot = tl.load(slots_T + row)
        temperature = tl.load(temperature_S + slot)
        if temperature > 0:
            # The pair at position t proposes the token of position t + 2.
            key_a, key_b = noise_keys(tl.load(seed_S + slot), tl.load(position_T + row) + 2)
            token = tl.load(target_id_V + first + number, mask=inside, other=0)
            score = score * tl.div_rn(1.0, temperature) + gumbel(key_a, key_b, token)
    cell = row * tl.num_programs(1) + block
    if TOPK == 1:  # a chain ranks nothing against anything: no softmax needed
        tl.store(key_TCK + cell, best_key(score, number + first, inside))
    else:
        key = tl.where(inside, make_key(score, number + first), LOWEST_KEY)
        for place in range(TOPK):
            best = tl.max(key, axis=0)
            tl.store(key_TCK + cell * TOPK + place, best)
            key = tl.where(key == best, LOWEST_KEY, key)
        score = tl.where(inside, score, float("-inf"))
        peak = tl.max(score, axis=0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(peak_TC + cell, peak)
        tl.store(total_TC + cell, tl.sum(tl.exp(score - base), axis=0))


def propose(
    logits_TV: Tensor,
    slots_T: Tensor,
    position_T: Tensor,
    target_id_V: Tensor,
    *,
    temperature_S: Tensor,
    seed_S: Tensor,
    topk: int,
    noise: bool,
    part: Vocabulary | None = None,
) -> Proposals:
    """Candidates of each row by block. position_T: the rows' own (rotary) positions. part: of which
    draft ids the logits are, where ranks share them; the blocks of all ranks are gathered then."""
    (num_rows, vocab_size), device = logits_TV.shape, logits_TV.device
    block = block_size(num_rows)
    num_blocks = triton.cdiv(vocab_size if part is None else part.widest, block)
    key_TCK = torch.empty(num_rows, num_blocks, topk, dtype=torch.int64, device=device)
    peak_TC = torch.empty(num_rows, num_blocks, device=device)
    total_TC = torch.empty(num_rows, num_blocks, device=device)
    _propose_kernel[(num_rows, num_blocks)](
        logits_TV,
        logits_TV.stride(0),
        slots_T,
        position_T,
        temperature_S,
        seed_S,
        target_id_V,
        key_TCK,
        peak_TC,
        total_TC,
        vocab_size,
        0 if part is None else part.first,
        TOPK=topk,
        NOISE=noise,
        BLOCK=block,
        **launch_options(),
    )
    if part is not None:
        key_TCK = part.join(key_TCK.flatten(1)).view(num_rows, -1, topk)
        if topk > 1:
            peak_TC, total_TC = part.join(peak_TC), part.join(total_TC)
    return Proposals(key_TCK, peak_TC, total_TC)


@triton.jit
def row_totals(
    peak_TC,
    total_TC,
    row_K,
    inside_K,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    """log-sum-exp of the scores of some rows."""
    block = tl.arange(0, BLOCKS)
    cell_KC = row_K[:, None] * num_blocks + block[None, :]
    inside_KC = inside_K[:, None] & (block < num_blocks)[None, :]
    peak_KC = tl.load(peak_TC + cell_KC, mask=inside_KC, other=float("-inf"))
    total_KC = tl.load(total_TC + cell_KC, mask=inside_KC, other=0.0)
    peak_K = tl.max(peak_KC, axis=1)
    base_K = tl.where(peak_K == float("-inf"), 0.0, peak_K)
    share_KC = total_KC * tl.exp(peak_KC - base_K[:, None])
    total_K = tl.sum(share_KC, axis=1)
    return base_K + tl.log(tl.where(total_K > 0, total_K, 1.0))


@triton.jit
def row_best(
    key_TCK,
    row_K,
    inside_K,
    num_keys,
    TOPK: tl.constexpr,
    PLACES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The best TOPK keys of some rows, best first: [rows, PLACES]."""
    number = tl.arange(0, KEYS)
    place = tl.arange(0, PLACES)
    inside = inside_K[:, None] & (number < num_keys)[None, :]
    cell = row_K[:, None] * num_keys + number[None, :]
    key = tl.load(key_TCK + cell, mask=inside, other=LOWEST_KEY)
    best_KP = tl.zeros_like(row_K).to(tl.int64)[:, None] + tl.zeros((1, PLACES), tl.int64)
    for number_best in range(TOPK):
        best_K = tl.max(key, axis=1)
        best_KP = tl.where(place[None, :] == number_best, best_K[:, None], best_KP)
        key = tl.where(key == best_K[:, None], LOWEST_KEY, key)
    return best_KP


@triton.jit
def _first_level_kernel(
    key_TCK,
    peak_TC,
    total_TC,
    num_blocks,
    slots_B,
    target_id_V,
    hidden_BH,
    hidden_stride,
    candidate_token_SK,
    candidate_score_SK,
    draft_hidden_SH,
    hidden_size,
    TOPK: tl.constexpr,
    PLACES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_B + row)
    if tl.program_id(1) == 0:
        one = tl.arange(0, 1)
        row_1 = row + one
        key_1P = row_best(key_TCK, row_1, one == 0, num_blocks * TOPK, TOPK, PLACES, KEYS)
        place_1P = tl.arange(0, PLACES)[None, :] + 0 * one[:, None]
        kept_1P = place_1P < TOPK
        cell_1P = slot * TOPK + place_1P
        index_1P = tl.where(kept_1P, key_index(key_1P), 0)
        token_1P = tl.load(target_id_V + index_1P, mask=kept_1P, other=0)
        score_1P = tl.zeros((1, PLACES), tl.float32)
        if TOPK > 1:
            total_1 = row_totals(peak_TC, total_TC, row_1, one == 0, num_blocks, BLOCKS)
            score_1P = key_value(key_1P) - total_1[:, None]
        tl.store(candidate_token_SK + cell_1P, token_1P, mask=kept_1P)
        tl.store(candidate_score_SK + cell_1P, score_1P, mask=kept_1P)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < hidden_size
    hidden = tl.load(hidden_BH + row.to(tl.int64) * hidden_stride + offset, mask=inside)
    tl.store(draft_hidden_SH + slot * hidden_size + offset, hidden, mask=inside)


def store_first_level(
    proposals: Proposals,
    slots_B: Tensor,
    target_id_V: Tensor,
    hidden_BH: Tensor,
    *,
    candidate_token_SK: Tensor,
    candidate_score_SK: Tensor,
    draft_hidden_SH: Tensor,
) -> None:
    """Write each slot's first-level candidates and the hidden state that they come from."""
    num_requests, hidden_size = hidden_BH.shape
    _, num_blocks, topk = proposals.key_TCK.shape
    _first_level_kernel[(num_requests, triton.cdiv(hidden_size, 1024))](
        proposals.key_TCK,
        proposals.peak_TC,
        proposals.total_TC,
        num_blocks,
        slots_B,
        target_id_V,
        hidden_BH,
        hidden_BH.stride(0),
        candidate_token_SK,
        candidate_score_SK,
        draft_hidden_SH,
        hidden_size,
        TOPK=topk,
        PLACES=triton.next_power_of_2(topk),
        KEYS=triton.next_power_of_2(proposals.num_keys),
        BLOCKS=triton.next_power_of_2(num_blocks),
        BLOCK=1024,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["column"])
def _chain_kernel(
    key_TC,
    num_blocks,
    target_id_V,
    next_B,
    token_BN,
    num_nodes,
    column,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    key = tl.load(key_TC + row * num_blocks + block, mask=block < num_blocks, other=LOWEST_KEY)
    token = tl.load(target_id_V + key_index(tl.max(key, axis=0)))
    tl.store(next_B + row, token)
    tl.store(token_BN + row * num_nodes + column, token)


def extend_chain(
    proposals: Proposals, target_id_V: Tensor, token_BN: Tensor, *, column: int
) -> Tensor:
    """The best candidate of each row as int64 [B], written to a column of token_BN too."""
    num_requests, num_nodes = token_BN.shape
    num_blocks = proposals.key_TCK.shape[1]
    next_B = torch.empty(num_requests, dtype=torch.int64, device=token_BN.device)
    _chain_kernel[(num_requests,)](
        proposals.key_TCK,
        num_blocks,
        target_id_V,
        next_B,
        token_BN,
        num_nodes,
        column,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1,
        **launch_options(),
    )
    return next_B
