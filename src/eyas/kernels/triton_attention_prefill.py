# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Triton: causal attention of several prompt chunks over the paged cache, one launch a layer (D8).

The chunks' bounds are host numbers: the host lists blocks of (row, query head) pairs, and the list
travels in one small copy. Oracle: attention.torch_backend.

Shape suffixes: T rows, I items, C chunks, P pages, R rows of the cache, H query heads,
K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ITEM_FIELDS = 4  # request, first pair of the block, first row of the chunk in the batch, its start


@triton.jit(do_not_specialize=["num_chunks", "num_tokens"])
def _write_rows_kernel(
    chunks_ptr, table_ptr, write_ptr, table_stride, num_chunks, num_tokens, PAGE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """chunks: int64 [C, 2], the batch row after the chunk and (position - batch row)."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_C)
    after_C = tl.load(chunks_ptr + c * 2, mask=c < num_chunks, other=1 << 60)
    request_T = tl.sum((after_C[None, :] <= t[:, None]).to(tl.int32), 1)
    ok_T = t < num_tokens
    position_T = t + tl.load(chunks_ptr + request_T * 2 + 1, mask=ok_T, other=0)
    place_T = request_T.to(tl.int64) * table_stride + position_T // PAGE
    page_T = tl.load(table_ptr + place_T, mask=ok_T, other=0)
    tl.store(write_ptr + t, page_T * PAGE + position_T % PAGE, mask=ok_T)


@triton.jit
def _attend_columns(
    q_MD, k_ptr, v_ptr, table_ptr, position_M, begin, end, scale, top_M, sum_M, acc_MD,
    PAGE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Cache entries begin .. end - 1; without MASKED all rows see all of them, in whole blocks."""
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    first_N = begin + tl.arange(0, BLOCK_N)
    # A step ahead: keys and values then wait for nothing, and more of them are under way.
    page_N = tl.load(table_ptr + first_N // PAGE, mask=first_N < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):
        index_N = start + tl.arange(0, BLOCK_N)
        next_N = index_N + BLOCK_N
        next_page_N = tl.load(table_ptr + next_N // PAGE, mask=next_N < end, other=0)
        if MASKED:
            ok_N = index_N < end
        else:
            ok_N = tl.full([BLOCK_N], True, tl.int1)
        row_N = page_N * PAGE + index_N % PAGE
        k_ND = tl.load(
            k_ptr + (row_N * (NUM_KV_HEADS * D))[:, None] + d[None, :],
            mask=ok_N[:, None] & (d < D)[None, :],
            other=0.0,
        )
        v_ND = tl.load(
            v_ptr + (row_N * (NUM_KV_HEADS * DV))[:, None] + dv[None, :],
            mask=ok_N[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
        if MASKED:
            s_MN = tl.where(index_N[None, :] <= position_M[:, None], s_MN, float("-inf"))
        new_M = tl.maximum(top_M, tl.max(s_MN, 1))
        safe_M = tl.where(new_M == float("-inf"), 0.0, new_M)
        p_MN = tl.exp2(s_MN - safe_M[:, None])
        old_M = tl.exp2(top_M - safe_M)
        sum_M = sum_M * old_M + tl.sum(p_MN, 1)
        acc_MD = acc_MD * old_M[:, None]
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision="ieee")
        top_M = new_M
        page_N = next_page_N
    return top_M, sum_M, acc_MD


@triton.jit(do_not_specialize=["scale"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, items_ptr, ends_ptr, table_ptr, scale, token_stride, head_stride,
    table_stride, PAGE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M (row, query head) pairs of one key/value head of one chunk."""
    head = tl.program_id(0)
    item_ptr = items_ptr + tl.program_id(1) * 4
    request = tl.load(item_ptr)
    first_pair = tl.load(item_ptr + 1).to(tl.int32)
    first_row = tl.load(item_ptr + 2)
    start = tl.load(item_ptr + 3).to(tl.int32)
    after_row = tl.load(ends_ptr + request * 2)
    m = first_pair + tl.arange(0, BLOCK_M)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row_M = first_row + m // GROUP
    ok_M = row_M < after_row
    position_M = start + m // GROUP
    q_MD = tl.load(
        q_ptr
        + (row_M * token_stride)[:, None]
        + ((head * GROUP + m % GROUP) * head_stride)[:, None]
        + d[None, :],
        mask=ok_M[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(k_ptr.dtype.element_ty)
    table_ptr += request * table_stride
    k_ptr += head * D
    v_ptr += head * DV
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # All rows of the block see the columns up to its first row's own.
    whole = (start + first_pair // GROUP + 1) // BLOCK_N * BLOCK_N
    last = start + (first_pair + BLOCK_M - 1) // GROUP
    end = tl.minimum(last + 1, start + (after_row - first_row).to(tl.int32))
    top_M, sum_M, acc_MD = _attend_columns(
        q_MD, k_ptr, v_ptr, table_ptr, position_M, 0, whole, scale, top_M, sum_M, acc_MD, PAGE,
        NUM_KV_HEADS, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, False,
    )  # fmt: skip
    top_M, sum_M, acc_MD = _attend_columns(
        q_MD, k_ptr, v_ptr, table_ptr, position_M, whole, end, scale, top_M, sum_M, acc_MD, PAGE,
        NUM_KV_HEADS, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, True,
    )  # fmt: skip
    out_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    place_M = row_M * (NUM_KV_HEADS * GROUP * DV) + (head * GROUP + m % GROUP) * DV
    tl.store(
        out_ptr + place_M[:, None] + dv[None, :],
        out_MD.to(out_ptr.dtype.element_ty),
        mask=ok_M[:, None] & (dv < DV)[None, :],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """block_m: (row, query head) pairs a program; block_n: columns a step."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 2


def choose_prefill_config(
    num_pairs: int, dtype: torch.dtype, head_dim: int, shared_bytes: int
) -> PrefillConfig:
    """num_pairs: (row, query head) pairs of the longest chunk, per key/value head. shared_bytes:
    shared memory that one program may have."""
    if dtype.itemsize == 4:  # without matrix units: registers are what is short
        return PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)
    if num_pairs <= 64 or head_dim > 128:
        block_m = max(16, min(64, triton.next_power_of_2(num_pairs)))
        block_n = 64 if head_dim <= 128 else 32
        return PrefillConfig(block_m=block_m, block_n=block_n, num_warps=4)
    # Keys, values (twice with three stages), queries and weights.
    tiles = (2 * 2 * 64 + 2 * 128) * triton.next_power_of_2(head_dim) * dtype.itemsize
    return PrefillConfig(num_stages=3 if tiles <= shared_bytes else 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillWork:
    """One forward's plan. chunks_C2, items_IF: as the kernels read them, int64, on the device."""

    page_table_BP: Tensor
    page_size: int
    chunks_C2: Tensor
    items_IF: Tensor
    num_groups: int
    config: PrefillConfig


def to_device(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 tensor of host numbers, without a wait."""
    host = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def list_chunks(chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(batch row after the chunk, position - batch row) of chunks (start, end)."""
    row, rows = 0, []
    for start, end in chunks:
        rows.append((row + end - start, start - row))
        row += end - start
    return rows


def prefill_write_rows(
    chunks_C2: Tensor, page_table_BP: Tensor, page_size: int, num: int
) -> Tensor:
    """int64 pool rows of the batch's `num` rows."""
    write_T = page_table_BP.new_empty(num, dtype=torch.int64)
    _write_rows_kernel[(triton.cdiv(num, 256),)](
        chunks_C2,
        page_table_BP,
        write_T,
        page_table_BP.stride(0),
        len(chunks_C2),
        num,
        PAGE=page_size,
        BLOCK_C=triton.next_power_of_2(len(chunks_C2)),
        BLOCK_T=256,
        num_warps=4,
    )
    return write_T


def list_items(
    chunks: Sequence[tuple[int, int]], num_groups: int, block_m: int
) -> list[tuple[int, int, int, int]]:
    """The blocks of all chunks (ITEM_FIELDS), those with the most columns first."""
    row, items = 0, []
    for request, (start, end) in enumerate(chunks):
        num_pairs = (end - start) * num_groups
        items += [(request, first, row, start) for first in range(0, num_pairs, block_m)]
        row += end - start
    return sorted(items, key=lambda item: -(item[3] + item[1] // num_groups))


def attend_prefill(
    q_THD: Tensor, cache: tuple[Tensor, Tensor], work: PrefillWork, *, scale: float
) -> Tensor:
    """[T, H, D] -> [T, H * Dv]."""
    k_RKD, v_RKD = cache
    num_kv_heads, size, v_size = *k_RKD.shape[1:], v_RKD.shape[2]
    out_TE = q_THD.new_empty(len(q_THD), q_THD.shape[1] * v_size)
    config = work.config
    _prefill_kernel[(num_kv_heads, len(work.items_IF))](
        q_THD,
        k_RKD,
        v_RKD,
        out_TE,
        work.items_IF,
        work.chunks_C2,
        work.page_table_BP,
        scale * 1.4426950408889634,
        *q_THD.stride()[:2],
        work.page_table_BP.stride(0),
        PAGE=work.page_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=work.num_groups,
        D=size,
        DV=v_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(max(size, 16)),
        BLOCK_DV=triton.next_power_of_2(max(v_size, 16)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_TE
