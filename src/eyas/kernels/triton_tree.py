# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Growing and pruning draft trees in Triton: `speculative.tree.TreeBuilder`, a launch a step.

Shape suffixes: B requests, K beams (topk), P = K padded to a power of two, A candidates in all,
N nodes kept, R draft rows, H draft hidden.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton_draft import Proposals, row_best, row_totals
from eyas.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs
from eyas.kernels.triton_numbers import LOWEST_KEY, key_index, key_value, make_key


@dataclasses.dataclass(frozen=True)
class Beams:
    """What the next level needs of its beams. token_T, candidate_T, score_T, seen_T: [B * K];
    seen_T: bit r is set where a beam attends to draft row r (its own row left out). hidden_TH."""

    token_T: Tensor
    score_T: Tensor
    candidate_T: Tensor
    seen_T: Tensor
    hidden_TH: Tensor


@dataclasses.dataclass(frozen=True)
class Candidates:
    """All candidates of the trees, [B, A]: token, score and parent candidate (int32; -1: the
    root). The first level's are there from the start (`triton_round.begin`)."""

    token_BA: Tensor
    score_BA: Tensor
    parent_BA: Tensor


@triton.jit(
    do_not_specialize=["num_candidates", "first_candidate", "first_row", "num_visible"],
)
def _advance_kernel(
    key_TCK,
    peak_TC,
    total_TC,
    num_blocks,
    target_id_V,
    score_T,
    candidate_T,
    seen_T,
    hidden_TH,
    hidden_stride,
    token_BA,
    score_BA,
    parent_BA,
    num_candidates,
    first_candidate,
    first_row,
    new_token_T,
    new_score_T,
    new_candidate_T,
    new_seen_T,
    new_hidden_TH,
    visible_TR,
    num_visible,
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (b, k) finds all of a request's next beams, and copies the hidden state of the k-th;
    the first one writes everything else."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    request, mine = tl.program_id(0), tl.program_id(1)
    writes = mine == 0
    place = tl.arange(0, P)
    beam_inside = place < TOPK
    row_K = request * TOPK + place
    # The children of each beam: [beam, child].
    key = row_best(key_TCK, row_K, beam_inside, num_blocks * TOPK, TOPK, P, KEYS)
    total_K = row_totals(peak_TC, total_TC, row_K, beam_inside, num_blocks, BLOCKS)
    inside = beam_inside[:, None] & beam_inside[None, :]
    index = tl.where(inside, key_index(key), 0)
    token = tl.load(target_id_V + index, mask=inside, other=0)
    parent_score_K = tl.load(score_T + row_K, mask=beam_inside, other=0.0)
    score = parent_score_K[:, None] + (key_value(key) - total_K[:, None])
    flat = place[:, None] * TOPK + place[None, :]
    candidate = request * num_candidates + first_candidate + flat
    parent_K = tl.load(candidate_T + row_K, mask=beam_inside, other=0)
    tl.store(token_BA + candidate, token, mask=inside & writes)
    tl.store(score_BA + candidate, score, mask=inside & writes)
    tl.store(parent_BA + candidate, parent_K[:, None] + tl.zeros_like(flat), mask=inside & writes)
    if not LAST:
        # The best TOPK of them are the next beams.
        seen_K = tl.load(seen_T + row_K, mask=beam_inside, other=0)
        seen_K |= tl.full((P,), 1, tl.int64) << (first_row + place).to(tl.int64)
        order = tl.where(inside, make_key(score, flat), LOWEST_KEY)
        new_seen = tl.zeros((P,), tl.int64)
        my_beam = tl.zeros((), tl.int32)
        for new in range(TOPK):
            best = tl.max(tl.max(order, axis=1), axis=0)
            order = tl.where(order == best, LOWEST_KEY, order)
            number = key_index(best)
            beam = number // TOPK
            new_row = request * TOPK + new
            chosen = tl.sum(tl.sum(tl.where(inside & (flat == number), token, 0), axis=1), axis=0)
            tl.store(new_token_T + new_row, chosen, mask=writes)
            tl.store(new_score_T + new_row, key_value(best), mask=writes)
            tl.store(new_candidate_T + new_row, first_candidate + number, mask=writes)
            seen = tl.sum(tl.where(place == beam, seen_K, 0), axis=0)
            tl.store(new_seen_T + new_row, seen, mask=writes)
            new_seen = tl.where(place == new, seen, new_seen)
            my_beam = tl.where(new == mine, beam, my_beam)
        offset = tl.arange(0, BLOCK)
        source = hidden_TH + (request * TOPK + my_beam).to(tl.int64) * hidden_stride
        target = new_hidden_TH + (request * TOPK + mine).to(tl.int64) * HIDDEN
        for start in range(0, HIDDEN, BLOCK):
            within = start + offset < HIDDEN
            value = tl.load(source + start + offset, mask=within)
            tl.store(target + start + offset, value, mask=within)
        # What their draft rows may see: ancestors, and their own row (the next level's).
        row = tl.arange(0, ROWS)
        seen_bit = (new_seen[:, None] >> row[None, :].to(tl.int64)) & 1
        own = row[None, :] == first_row + TOPK + place[:, None]
        visible = tl.where(own, 1, seen_bit)
        cell = row_K[:, None] * num_visible + row[None, :]
        shown = beam_inside[:, None] & (row < num_visible)[None, :] & writes
        tl.store(visible_TR + cell, visible.to(tl.int8), mask=shown)


def advance(
    proposals: Proposals,
    target_id_V: Tensor,
    beams: Beams,
    hidden_TH: Tensor,
    candidates: Candidates,
    *,
    level: int,
    depth: int,
) -> tuple[Beams, Tensor]:
    """Add the children of the beams of a level (from 1) and move to the best of them.

    hidden_TH: what the draft returned for the beams. After the last of `depth` levels, which is
    level depth - 1, no beams are made. Returns the next beams and what their rows may see, bool
    [B, K, (level + 1) * K].
    """
    num_rows, num_blocks, topk = proposals.key_TCK.shape
    num_requests, device = num_rows // topk, hidden_TH.device
    kept = (beams.token_T, beams.score_T, beams.candidate_T, beams.seen_T, beams.hidden_TH)
    new = Beams(*map(torch.empty_like, kept))
    num_visible, num_draft_rows = (level + 1) * topk, (depth - 1) * topk
    visible = torch.empty(num_requests, topk, num_visible, dtype=torch.bool, device=device)
    _advance_kernel[(num_requests, 1 if level == depth - 1 else topk)](
        proposals.key_TCK,
        proposals.peak_TC,
        proposals.total_TC,
        num_blocks,
        target_id_V,
        beams.score_T,
        beams.candidate_T,
        beams.seen_T,
        hidden_TH,
        hidden_TH.stride(0),
        candidates.token_BA,
        candidates.score_BA,
        candidates.parent_BA,
        candidates.token_BA.shape[1],
        topk + (level - 1) * topk**2,
        (level - 1) * topk,
        new.token_T,
        new.score_T,
        new.candidate_T,
        new.seen_T,
        new.hidden_TH,
        visible.view(torch.int8),
        num_visible,
        HIDDEN=hidden_TH.shape[1],
        TOPK=topk,
        P=triton.next_power_of_2(topk),
        KEYS=triton.next_power_of_2(proposals.num_keys),
        BLOCKS=triton.next_power_of_2(num_blocks),
        ROWS=triton.next_power_of_2(num_draft_rows),
        BLOCK=min(triton.next_power_of_2(hidden_TH.shape[1]), 4096),
        LAST=level == depth - 1,
        **launch_options(),
    )
    return new, visible


@triton.jit
def _finish_kernel(
    root_B,
    length_B,
    token_BA,
    score_BA,
    parent_BA,
    num_candidates,
    token_BN,
    parent_BN,
    depth_BN,
    position_BN,
    visible_BNN,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    N: tl.constexpr,
    A: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    node = tl.arange(0, N)
    candidate = tl.arange(0, A)
    inside = candidate < num_candidates
    start = request * num_candidates
    score = tl.load(score_BA + start + candidate, mask=inside, other=0.0)
    key = tl.where(inside, make_key(score, candidate), LOWEST_KEY)
    # Candidates kept, best first, at nodes 1 ..; sorted by number afterwards.
    kept = tl.full((N,), 0x7FFFFFFF, tl.int32)
    for place in range(1, NODES):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, LOWEST_KEY, key)
        kept = tl.where(node == place, key_index(best), kept)
    kept = tl.where(node == 0, -1, kept)  # the root: below all candidates
    rank = tl.sum((kept[None, :] < kept[:, None]).to(tl.int32), axis=1)
    kept = tl.sum(tl.where(rank[:, None] == node[None, :], kept[:, None], 0), axis=0)
    drafted = (node > 0) & (node < NODES)
    token = tl.load(token_BA + start + kept, mask=drafted, other=0)
    parent_candidate = tl.load(parent_BA + start + kept, mask=drafted, other=-1)
    same = parent_candidate[:, None] == kept[None, :]
    same &= (node < NODES)[None, :]
    up = tl.sum(tl.where(same, node[None, :], 0), axis=1)  # the root's own is the root
    above = node
    depth = tl.zeros((N,), tl.int32)
    seen = tl.full((N,), 1, tl.int64) << node.to(tl.int64)
    for _ in range(DEPTH):
        depth += (above > 0).to(tl.int32)
        above = tl.sum(tl.where(above[:, None] == node[None, :], up[None, :], 0), axis=1)
        seen |= tl.full((N,), 1, tl.int64) << above.to(tl.int64)
    root = node == 0
    token = tl.where(root, tl.load(root_B + request), token)
    used = node < NODES
    cell = request * NODES + node
    tl.store(token_BN + cell, token, mask=used)
    tl.store(parent_BN + cell, tl.where(root, -1, up).to(tl.int64), mask=used)
    tl.store(depth_BN + cell, depth.to(tl.int64), mask=used)
    tl.store(position_BN + cell, tl.load(length_B + request) + depth, mask=used)
    bit = (seen[:, None] >> node[None, :].to(tl.int64)) & 1
    square = cell[:, None] * NODES + node[None, :]
    tl.store(visible_BNN + square, bit.to(tl.int8), mask=used[:, None] & used[None, :])


def finish(
    candidates: Candidates, root_B: Tensor, length_B: Tensor, *, num_nodes: int, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(token_BN, parent_BN, depth_BN, position_BN, visible_BNN) of the trees that are kept."""
    num_requests, num_candidates = candidates.token_BA.shape
    device = root_B.device
    numbers = [
        torch.empty(num_requests, num_nodes, dtype=torch.int64, device=device) for _ in range(4)
    ]
    visible = torch.empty(num_requests, num_nodes, num_nodes, dtype=torch.bool, device=device)
    _finish_kernel[(num_requests,)](
        root_B,
        length_B,
        candidates.token_BA,
        candidates.score_BA,
        candidates.parent_BA,
        num_candidates,
        *numbers,
        visible.view(torch.int8),
        NODES=num_nodes,
        DEPTH=depth,
        N=triton.next_power_of_2(num_nodes),
        A=triton.next_power_of_2(num_candidates),
        **launch_options(),
    )
    token_BN, parent_BN, depth_BN, position_BN = numbers
    return token_BN, parent_BN, depth_BN, position_BN, visible
