# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Triton: attention of few rows a request over a paged prefix and a masked scratch tail (D7, D8).

Split-KV attention (Dao et al., "Flash-Decoding for long-context inference", 2023): a request's
columns (its prefix, then its scratch nodes) are cut into items of about equal length; the program
that finishes a request last combines them, or a second launch does (triton_attention_combine).
triton_attention_plan writes the list of items once a forward. Oracle: attention.torch_backend.

Counters are zero between launches: the program that combines resets its own.

Shape suffixes: B requests, Q rows a request, T = B * Q, N scratch nodes, I items, P pages,
R rows of the cache, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton_attention_combine import combine, combine_rows, tile
from eyas.kernels.triton_attention_plan import TreeWork
from eyas.kernels.triton_attention_rotate import Rotation, load_rotated
from eyas.kernels.triton_launch import (
    launch_options,
    let_next_start,
    prefetch,
    wait_for_inputs,
)


@triton.jit
def _load_rows(
    k_ptr, v_ptr, row_N, ok_N, d, dv, k_stride: tl.constexpr, v_stride: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values [N, D] of rows; not MASKED: of all of them."""
    k_at = k_ptr + (row_N * k_stride)[:, None] + d[None, :]
    v_at = v_ptr + (row_N * v_stride)[:, None] + dv[None, :]
    if MASKED:
        k_ND = tl.load(k_at, mask=ok_N[:, None] & (d < D)[None, :], other=0.0)
        v_ND = tl.load(v_at, mask=ok_N[:, None] & (dv < DV)[None, :], other=0.0)
    else:
        if D == BLOCK_D:
            k_ND = tl.load(k_at)
        else:
            k_ND = tl.load(k_at, mask=(d < D)[None, :], other=0.0)
        if DV == BLOCK_DV:
            v_ND = tl.load(v_at)
        else:
            v_ND = tl.load(v_at, mask=(dv < DV)[None, :], other=0.0)
    return k_ND, v_ND


@triton.jit
def _update(s_MN, v_ND, top_M, sum_M, acc_MD):
    """A step of the running softmax (scores in powers of two)."""
    new_M = tl.maximum(top_M, tl.max(s_MN, 1))
    safe_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    p_MN = tl.exp2(s_MN - safe_M[:, None])
    old_M = tl.exp2(top_M - safe_M)
    sum_M = sum_M * old_M + tl.sum(p_MN, 1)
    acc_MD = acc_MD * old_M[:, None]
    acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision="ieee")
    return new_M, sum_M, acc_MD


@triton.jit
def _prefetch_rows(
    k_ptr, v_ptr, row_N, ok_N, k_stride, v_stride, D: tl.constexpr, DV: tl.constexpr
):  # fmt: skip
    """Bring rows of keys and values into the L2 cache, of others the null row."""
    row_N = tl.where(ok_N, row_N, 0)
    step: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth  # a line's elements
    for offset in tl.static_range(0, D, step):
        prefetch(k_ptr + row_N * k_stride + offset)
    for offset in tl.static_range(0, DV, step):
        prefetch(v_ptr + row_N * v_stride + offset)


@triton.jit
def _write_tail(
    qkv_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_norm_ptr, eps, token_stride, head, request, num_rows,
    first_row, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, ROT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Rotate and store this head's keys, and values, of a request's own rows. k_ptr, v_ptr: at the
    head; qkv_ptr: at the whole projection."""
    q, d, dv = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    token = (request * num_rows + q).to(tl.int64)[:, None]
    ok = (q < num_rows)[:, None] & (d < D)[None, :]
    base = qkv_ptr + token * token_stride + (NUM_HEADS + head) * D
    k = load_rotated(
        base, d, ok, cos_ptr + token * ROT, sin_ptr + token * ROT, k_norm_ptr, eps, D, ROT, HAS_NORM
    )
    row = (first_row + q).to(tl.int64)[:, None] * NUM_KV_HEADS
    tl.store(k_ptr + row * D + d[None, :], k.to(k_ptr.dtype.element_ty), mask=ok)
    ok_v = (q < num_rows)[:, None] & (dv < DV)[None, :]
    base_v = qkv_ptr + token * token_stride + (NUM_HEADS + NUM_KV_HEADS) * D + head * DV
    v = tl.load(base_v + dv[None, :], mask=ok_v, other=0.0)
    tl.store(v_ptr + row * DV + dv[None, :], v.to(v_ptr.dtype.element_ty), mask=ok_v)


@triton.jit(do_not_specialize=["num_rows", "first_node", "eps", "scale"])
def _tree_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, items_ptr, bits_ptr, table_ptr, partial_ptr, lse_ptr, counter_ptr,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, scale, token_stride, head_stride, table_stride,
    num_rows, first_node, FIRST_INDEX: tl.constexpr, PAGE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, FUSED: tl.constexpr,
    HAS_NORM: tl.constexpr, PRELOADED: tl.constexpr, PREFETCH: tl.constexpr,
    COMBINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one item, one key/value head, BLOCK_M of its (row, query head) pairs.

    FUSED: q_ptr is the whole projection; the programs whose item reaches the scratch tail also
    rotate and store the new rows (all of them the same bytes), then read them back.
    scale: of the scores, times log2(e). PRELOADED: the plan was read by such a kernel before, which
    let the next ones start only after its own wait; so the plan is complete before this one begins.
    """
    if not PRELOADED:
        wait_for_inputs(PDL)
        let_next_start(PDL)
    item_ptr = items_ptr + tl.program_id(1) * 8
    # All fields before the branch: one wait for all of them. Those of no work are not used.
    splits = tl.load(item_ptr + 4).to(tl.int32)
    request = tl.load(item_ptr).to(tl.int32)
    begin = tl.load(item_ptr + 1).to(tl.int32)
    end = tl.load(item_ptr + 2).to(tl.int32)
    first_item = tl.load(item_ptr + 3)
    prefix = tl.load(item_ptr + 5).to(tl.int32)
    scratch_row = tl.load(item_ptr + 6)
    seen = tl.load(item_ptr + 7)
    if splits == 0:
        return
    head = tl.program_id(0) % NUM_KV_HEADS
    first_m = (tl.program_id(0) // NUM_KV_HEADS) * BLOCK_M
    m = first_m + tl.arange(0, BLOCK_M)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    ok_M = m < num_rows * GROUP
    row_M = request * num_rows + m // GROUP
    bits_M = tl.load(bits_ptr + row_M, mask=ok_M, other=0)
    table_ptr += request.to(tl.int64) * table_stride
    k_ptr += head * D
    v_ptr += head * DV
    first_N = begin + tl.arange(0, BLOCK_N)
    # A step ahead: keys and values then wait for nothing, and more of them are under way.
    page_N = tl.load(table_ptr + (first_N + FIRST_INDEX) // PAGE, mask=first_N < prefix, other=0)
    if PREFETCH:  # the prefix is old: it may come nearer before the projection is there
        _prefetch_rows(
            k_ptr, v_ptr, page_N * PAGE + (first_N + FIRST_INDEX) % PAGE, first_N < prefix,
            NUM_KV_HEADS * D, NUM_KV_HEADS * DV, D, DV,
        )  # fmt: skip
    if PRELOADED:
        wait_for_inputs(PDL)
        let_next_start(PDL)
    token_M1 = row_M.to(tl.int64)[:, None]
    base_M1 = q_ptr + token_M1 * token_stride + ((head * GROUP + m % GROUP) * head_stride)[:, None]
    ok_MD = ok_M[:, None] & (d < D)[None, :]
    if FUSED:
        if end > prefix:
            _write_tail(
                q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_norm_ptr, eps, token_stride, head, request,
                num_rows, scratch_row + first_node, NUM_KV_HEADS * GROUP, NUM_KV_HEADS, D, DV, ROT,
                BLOCK_Q, BLOCK_D, BLOCK_DV, HAS_NORM,
            )  # fmt: skip
            tl.debug_barrier()  # the rows are read back by other threads of this program
        q_MD = load_rotated(
            base_M1, d, ok_MD, cos_ptr + token_M1 * ROT, sin_ptr + token_M1 * ROT, q_norm_ptr, eps,
            D, ROT, HAS_NORM,
        )  # fmt: skip
        q_MD = q_MD.to(k_ptr.dtype.element_ty)
    else:
        q_MD = tl.load(base_M1 + d[None, :], mask=ok_MD, other=0.0).to(k_ptr.dtype.element_ty)

    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # Blocks of the prefix alone need no mask; the rest is a step or two.
    num_full = tl.maximum(tl.minimum(end, prefix) - begin, 0) // BLOCK_N
    rest = begin + num_full * BLOCK_N
    for start in tl.range(begin, rest, BLOCK_N):
        index_N = start + tl.arange(0, BLOCK_N) + FIRST_INDEX
        in_next_N = index_N + (BLOCK_N - FIRST_INDEX) < prefix
        next_page_N = tl.load(table_ptr + (index_N + BLOCK_N) // PAGE, mask=in_next_N, other=0)
        row_N = page_N * PAGE + index_N % PAGE
        k_ND, v_ND = _load_rows(
            k_ptr, v_ptr, row_N, row_N, d, dv, NUM_KV_HEADS * D, NUM_KV_HEADS * DV, D, DV, BLOCK_D,
            BLOCK_DV, False,
        )  # fmt: skip
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
        top_M, sum_M, acc_MD = _update(s_MN, v_ND, top_M, sum_M, acc_MD)
        page_N = next_page_N
    for start in tl.range(rest, end, BLOCK_N, num_stages=1):
        column_N = start + tl.arange(0, BLOCK_N)
        node_N = column_N - prefix
        paged_N = node_N < 0
        in_tail_N = (node_N >= 0) & (node_N < 64)
        shift_N = tl.where(in_tail_N, node_N, 0).to(tl.int64)
        # A node that no row sees may never have been written: not even loaded.
        ok_N = paged_N | (in_tail_N & (((seen >> shift_N) & 1) != 0))
        # Only the first of these blocks can hold a part of the prefix.
        row_N = tl.where(
            paged_N, page_N * PAGE + (column_N + FIRST_INDEX) % PAGE, scratch_row + node_N
        )
        k_ND, v_ND = _load_rows(
            k_ptr, v_ptr, row_N, ok_N, d, dv, NUM_KV_HEADS * D, NUM_KV_HEADS * DV, D, DV, BLOCK_D,
            BLOCK_DV, True,
        )  # fmt: skip
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
        own_MN = ((bits_M[:, None] >> shift_N[None, :]) & 1) != 0
        s_MN = tl.where(paged_N[None, :] | (in_tail_N[None, :] & own_MN), s_MN, float("-inf"))
        top_M, sum_M, acc_MD = _update(s_MN, v_ND, top_M, sum_M, acc_MD)

    out_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    ok_MV = ok_M[:, None] & (dv < DV)[None, :]
    out_stride: tl.constexpr = NUM_KV_HEADS * GROUP * DV
    if splits == 1:
        place_M = row_M.to(tl.int64) * out_stride + (head * GROUP + m % GROUP) * DV
        target = out_ptr + place_M[:, None] + dv[None, :]
        tl.store(target, out_MD.to(out_ptr.dtype.element_ty), mask=ok_MV)
    else:
        lse_M = top_M + tl.log2(tl.where(sum_M == 0.0, 1.0, sum_M))  # -inf where nothing is seen
        stride = NUM_KV_HEADS * num_rows * GROUP
        lse_ptr += head * num_rows * GROUP
        partial_ptr += head * num_rows * GROUP * DV
        part_M = tl.program_id(1).to(tl.int64) * stride + m
        tl.store(lse_ptr + part_M, lse_M, mask=ok_M)
        tl.store(partial_ptr + part_M[:, None] * DV + dv[None, :], out_MD, mask=ok_MV)
        if COMBINE:
            tl.debug_barrier()  # all threads have stored before one of them counts
            counter_ptr += request * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == splits - 1:
                tl.store(counter_ptr, 0)
                combine(
                    partial_ptr, lse_ptr, out_ptr, first_item, splits, stride, out_stride, head,
                    request, num_rows, first_m, GROUP, DV, ROWS, BLOCK_M, BLOCK_DV, SPLITS,
                )  # fmt: skip


class Workspace:
    """Partial results and counters of split requests, shared by all layers and graphs of a pool.

    Buffers only grow, and those that captured graphs may hold are kept. Counters are zeroed when
    they are made, which must not happen inside a capture: each shape runs once before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._kept = device, list[Tensor]()
        self._partial = torch.empty(0, dtype=torch.float32, device=device)
        self._lse, self._counter = self._partial, torch.zeros(0, dtype=torch.int32, device=device)

    def take(self, num_rows: int, v_size: int, num_counters: int) -> tuple[Tensor, Tensor, Tensor]:
        """(partial results, their log-sum-exp, counters), each of at least the size asked for."""
        self._partial = self._grown(self._partial, num_rows * v_size)
        self._lse = self._grown(self._lse, num_rows)
        self._counter = self._grown(self._counter, num_counters)
        return self._partial, self._lse, self._counter

    def _grown(self, buffer: Tensor, size: int) -> Tensor:
        if buffer.numel() >= size:
            return buffer
        self._kept.append(buffer)
        size = triton.next_power_of_2(size)
        return torch.zeros(size, dtype=buffer.dtype, device=self._device)


def attend_tree(
    q_ptr: Tensor,
    strides: tuple[int, int],
    cache: tuple[Tensor, Tensor],
    work: TreeWork,
    workspace: Workspace,
    *,
    scale: float,
    rotation: Rotation | None = None,
    preloaded: bool = False,
) -> Tensor:
    """[T, H * Dv]. q_ptr: queries, rows (token, head) at the given strides; with a rotation the
    whole projection, of which k and v are stored too (then the head stride is D). preloaded: not
    the first call with this plan."""
    k_RKD, v_RKD = cache
    num_kv_heads, size, v_size = *k_RKD.shape[1:], v_RKD.shape[2]
    num_requests, num_rows = work.bits_BQ.shape
    num_items, num_m = len(work.items_IF), work.num_m
    num_partial = num_items * num_kv_heads * num_rows * work.num_groups
    partial, lse, counter = workspace.take(num_partial, v_size, num_requests * num_kv_heads * num_m)
    out_TE = q_ptr.new_empty(num_requests * num_rows, num_kv_heads * work.num_groups * v_size)
    turn = rotation or Rotation(q_ptr[:0], q_ptr[:0])
    _tree_kernel[(num_kv_heads * num_m, num_items)](
        q_ptr,
        k_RKD,
        v_RKD,
        out_TE,
        *(work.items_IF, work.bits_BQ, work.page_table_BP),
        *(partial, lse, counter),
        *turn.arguments(),
        scale * 1.4426950408889634,
        *strides,
        work.page_table_BP.stride(0),
        num_rows,
        work.first_node,
        NUM_KV_HEADS=num_kv_heads,
        D=size,
        DV=v_size,
        ROT=turn.size if rotation else 0,
        FUSED=rotation is not None,
        HAS_NORM=rotation is not None and rotation.q_norm_D is not None,
        PRELOADED=preloaded,
        **_settings(work),
        **_block_sizes(work, size, v_size),
        **launch_options(),
    )
    if work.config.combine == "apart":
        combine_rows(
            (partial, lse),
            out_TE,
            work.spans_B2,
            num_rows=num_rows,
            num_kv_heads=num_kv_heads,
            num_groups=work.num_groups,
        )
    return out_TE


def _settings(work: TreeWork) -> dict[str, Any]:
    """What a plan fixes of its kernels."""
    config = work.config
    return {
        "FIRST_INDEX": work.first_index,
        "PAGE": work.page_size,
        "GROUP": work.num_groups,
        "PREFETCH": config.prefetch and isinstance(_tree_kernel, triton.runtime.JITFunction),
        "COMBINE": config.combine == "last",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _block_sizes(work: TreeWork, size: int, v_size: int) -> dict[str, int]:
    """Sizes of tiles: powers of two, and what the matrix units take at least."""
    num_rows = work.bits_BQ.shape[1]
    block_dv = triton.next_power_of_2(max(v_size, 16))
    most = min(work.block_m, triton.next_power_of_2(num_rows * work.num_groups))
    rows, splits = tile(most, block_dv, work.config.num_warps)
    return {
        "BLOCK_M": work.block_m,
        "BLOCK_N": work.config.block_n,
        "BLOCK_D": triton.next_power_of_2(max(size, 16)),
        "BLOCK_DV": block_dv,
        "BLOCK_Q": triton.next_power_of_2(num_rows),
        "ROWS": rows,
        "SPLITS": splits,
    }
