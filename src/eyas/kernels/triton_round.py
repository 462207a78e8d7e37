# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""What a round does between the models' forwards, in Triton: a launch for each of its steps.

`begin` gathers the slots' data, `settle` accepts and emits and says where everything goes, and
`copy_rows` and `keep_hidden` bring it there. `reference.walk_tree` and `reference.cut_emitted`
describe the rules.

Shape suffixes: B requests, K topk, T = B * K rows, N tree nodes, E = depth + 1 emitted at most,
S slots, P pages, M stop ids, V vocabulary, D draft levels, H draft hidden, L layers, R pool rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs


@triton.jit
def _begin_kernel(
    slots_B,
    length_S,
    pending_S,
    page_table_SP,
    candidate_token_SK,
    candidate_score_SK,
    candidate_width,
    draft_hidden_SH,
    length_B,
    draft_end_B,
    page_table_BP,
    root_B,
    token_BN,
    position_BN,
    slots_T,
    token_T,
    score_T,
    candidate_T,
    seen_T,
    hidden_TH,
    position_DT,
    token_BA,
    score_BA,
    parent_BA,
    num_nodes,
    num_candidates,
    num_rows,
    PAGES: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    DEPTH: tl.constexpr,
    CHAIN: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a beam; the first of a request also gathers what is the request's own."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    request, beam = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_B + request)
    length = tl.load(length_S + slot)
    offset = tl.arange(0, BLOCK)
    if beam == 0:
        tl.store(length_B + request, length)
        tl.store(draft_end_B + request, length + 1)
        pending = tl.load(pending_S + slot)
        tl.store(root_B + request, pending)
        for start in range(0, PAGES, BLOCK):
            within = start + offset < PAGES
            page = tl.load(page_table_SP + slot * PAGES + start + offset, mask=within)
            tl.store(page_table_BP + request * PAGES + start + offset, page, mask=within)
        if CHAIN:
            node = tl.arange(0, N)
            cell = request * num_nodes + node
            tl.store(position_BN + cell, length + node, mask=node < num_nodes)
            tl.store(token_BN + request * num_nodes, pending)
            if DEPTH > 0:
                first = tl.load(candidate_token_SK + slot * candidate_width)
                tl.store(token_BN + request * num_nodes + 1, first)
    if DEPTH > 0:
        row = request * TOPK + beam
        tl.store(slots_T + row, slot)
        token = tl.load(candidate_token_SK + slot * candidate_width + beam)
        score = tl.load(candidate_score_SK + slot * candidate_width + beam)
        tl.store(token_T + row, token)
        tl.store(score_T + row, score)
        if not CHAIN:
            tl.store(token_BA + request * num_candidates + beam, token)
            tl.store(score_BA + request * num_candidates + beam, score)
            tl.store(parent_BA + request * num_candidates + beam, -1)
        tl.store(candidate_T + row, beam)
        tl.store(seen_T + row, tl.zeros((), tl.int64))
        for level in tl.static_range(DEPTH - 1):
            tl.store(position_DT + level * num_rows + row, length + level)
        target = hidden_TH + row.to(tl.int64) * HIDDEN
        for start in range(0, HIDDEN, BLOCK):
            within = start + offset < HIDDEN
            value = tl.load(draft_hidden_SH + slot * HIDDEN + start + offset, mask=within)
            tl.store(target + start + offset, value, mask=within)


def _room(
    num_requests: int,
    num_rows: int,
    *,
    num_nodes: int,
    num_candidates: int,
    num_levels: int,
    page_table_SP: Tensor,
    draft_hidden_SH: Tensor,
) -> dict[str, Tensor]:
    """What `begin` fills, in the order of its kernel's arguments."""
    by_request, by_node = (num_requests,), (num_requests, num_nodes)
    by_candidate = (num_requests, num_candidates)
    shapes = {
        "length_B": (by_request, torch.int64),
        "draft_end_B": (by_request, torch.int64),
        "page_table_BP": ((num_requests, page_table_SP.shape[1]), torch.int64),
        "root_B": (by_request, torch.int64),
        "token_BN": (by_node, torch.int64),
        "position_BN": (by_node, torch.int64),
        "slots_T": ((num_rows,), torch.int64),
        "token_T": ((num_rows,), torch.int64),
        "score_T": ((num_rows,), torch.float32),
        "candidate_T": ((num_rows,), torch.int32),
        "seen_T": ((num_rows,), torch.int64),
        "hidden_TH": ((num_rows, draft_hidden_SH.shape[1]), draft_hidden_SH.dtype),
        "position_DT": ((num_levels, num_rows), torch.int64),
        "token_BA": (by_candidate, torch.int64),
        "score_BA": (by_candidate, torch.float32),
        "parent_BA": (by_candidate, torch.int32),
    }
    return {
        name: torch.empty(shape, dtype=dtype, device=page_table_SP.device)
        for name, (shape, dtype) in shapes.items()
    }


def begin(
    slots_B: Tensor,
    *,
    length_S: Tensor,
    pending_S: Tensor,
    page_table_SP: Tensor,
    candidate_token_SK: Tensor,
    candidate_score_SK: Tensor,
    draft_hidden_SH: Tensor,
    depth: int,
    topk: int,
    num_nodes: int,
) -> dict[str, Tensor]:
    """Everything that a round gathers by slot, under its name.

    length_B, draft_end_B = length + 1, page_table_BP, root_B (the pending token). For a chain:
    token_BN with the first two columns filled in, position_BN. With draft levels, [B * K]:
    slots_T, token_T, score_T, candidate_T, seen_T, hidden_TH of the first beams, and position_DT.
    For a tree: token_BA, score_BA and parent_BA with the first level filled in.
    """
    num_requests, num_rows = len(slots_B), len(slots_B) * topk
    num_candidates = topk + max(depth - 1, 0) * topk**2 if topk > 1 else 0
    out = _room(
        num_requests,
        num_rows,
        num_nodes=num_nodes,
        num_candidates=num_candidates,
        num_levels=max(depth - 1, 0),
        page_table_SP=page_table_SP,
        draft_hidden_SH=draft_hidden_SH,
    )
    _begin_kernel[(num_requests, topk)](
        slots_B,
        length_S,
        pending_S,
        page_table_SP,
        candidate_token_SK,
        candidate_score_SK,
        candidate_token_SK.shape[1],
        draft_hidden_SH,
        *out.values(),
        num_nodes,
        num_candidates,
        num_rows,
        PAGES=page_table_SP.shape[1],
        HIDDEN=draft_hidden_SH.shape[1],
        TOPK=topk,
        DEPTH=depth,
        CHAIN=topk == 1,
        N=triton.next_power_of_2(num_nodes),
        BLOCK=min(triton.next_power_of_2(max(draft_hidden_SH.shape[1], 1024)), 4096),
        **launch_options(),
    )
    return out


@triton.jit
def _copy_rows_kernel(
    k_LRK,
    v_LRK,
    source_T,
    destination_T,
    trash_row,
    num_rows,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    entry, layer = tl.program_id(0), tl.program_id(1)
    source, destination = tl.load(source_T + entry), tl.load(destination_T + entry)
    if destination != trash_row:
        offset = tl.arange(0, BLOCK)
        first = layer.to(tl.int64) * num_rows
        for start in range(0, K_SIZE, BLOCK):
            within = start + offset < K_SIZE
            value = tl.load(k_LRK + (first + source) * K_SIZE + start + offset, mask=within)
            tl.store(k_LRK + (first + destination) * K_SIZE + start + offset, value, mask=within)
        for start in range(0, V_SIZE, BLOCK):
            within = start + offset < V_SIZE
            value = tl.load(v_LRK + (first + source) * V_SIZE + start + offset, mask=within)
            tl.store(v_LRK + (first + destination) * V_SIZE + start + offset, value, mask=within)


def copy_rows(
    pools: Sequence[Tensor], source_T: Tensor, destination_T: Tensor, *, trash_row: int
) -> None:
    """Copy rows of one or two pools [L, R, K, D] in all layers; no source may be a destination
    too, and what would go to the trash row is left out."""
    k_LRKD, v_LRKD = pools[0], pools[-1]
    num_layers, num_rows = k_LRKD.shape[:2]
    sizes = [x.shape[2] * x.shape[3] for x in (k_LRKD, v_LRKD)]
    if len(pools) == 1:
        sizes[1] = 0
    _copy_rows_kernel[(len(source_T), num_layers)](
        k_LRKD,
        v_LRKD,
        source_T,
        destination_T,
        trash_row,
        num_rows,
        K_SIZE=sizes[0],
        V_SIZE=sizes[1],
        BLOCK=min(triton.next_power_of_2(max(sizes)), 2048),
        **launch_options(),
    )


@triton.jit
def _keep_hidden_kernel(
    hidden_TH,
    hidden_stride,
    slots_B,
    page_T,
    last_B,
    moved_B,
    page_end_PH,
    draft_input_SH,
    kept_BH,
    trash_page,
    rows_a_slot,
    hidden_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    request = row // rows_a_slot
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < hidden_size
    slot, page = tl.load(slots_B + request), tl.load(page_T + row)
    hidden = tl.load(hidden_TH + row.to(tl.int64) * hidden_stride + offset, mask=inside)
    if page != trash_page:
        tl.store(page_end_PH + page * hidden_size + offset, hidden, mask=inside)
    kept = kept_BH + request.to(tl.int64) * hidden_size + offset
    state = draft_input_SH + slot * hidden_size + offset
    if row == tl.load(last_B + request):
        if tl.load(moved_B + request) != 0:
            tl.store(state, hidden, mask=inside)
            tl.store(kept, hidden, mask=inside)
        else:
            tl.store(kept, tl.load(state, mask=inside), mask=inside)


def keep_hidden(
    hidden_TH: Tensor,
    *,
    slots_B: Tensor,
    page_T: Tensor,
    last_B: Tensor,
    moved_B: Tensor,
    page_end_PH: Tensor,
    draft_input_SH: Tensor,
    trash_page: int,
) -> Tensor:
    """Keep s of rows that end a page and of each slot's last row; returns the slots' s [B, H].

    page_T: the page that a row ends, or the trash page. last_B: each slot's last row, which counts
    where moved_B (int64) is not 0. Each slot has equally many rows.
    """
    num_rows, hidden_size = hidden_TH.shape
    kept_BH = draft_input_SH.new_empty(len(slots_B), hidden_size)
    _keep_hidden_kernel[(num_rows, triton.cdiv(hidden_size, 1024))](
        hidden_TH,
        hidden_TH.stride(0),
        slots_B,
        page_T,
        last_B,
        moved_B,
        page_end_PH,
        draft_input_SH,
        kept_BH,
        trash_page,
        num_rows // len(slots_B),
        hidden_size,
        BLOCK=1024,
        **launch_options(),
    )
    return kept_BH
