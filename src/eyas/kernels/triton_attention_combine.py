# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Triton: the partial results of a split request, weighed by their sums and added (D7).

Either by the program that finishes a request last, or by a launch of its own: more programs, but
one launch more even where nothing is split.

Shape suffixes as in triton_attention; S splits, M (row, query head) pairs of a key/value head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs


@triton.jit
def _weigh(
    partial_ptr, lse_ptr, first_row, splits, stride, m, ok_M, DV: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_DV]: rows m of all splits, first_row + split * stride + m."""
    dv = tl.arange(0, BLOCK_DV)
    top_M = tl.full([ROWS], float("-inf"), tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    acc_MD = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        row_SM = (first_row + split.to(tl.int64) * stride)[:, None] + m[None, :]
        ok_SM = (split < splits)[:, None] & ok_M[None, :]
        # Not through the first-level cache: other multiprocessors have just written these.
        lse_SM = tl.load(lse_ptr + row_SM, mask=ok_SM, other=float("-inf"), cache_modifier=".cg")
        part_SMD = tl.load(
            partial_ptr + row_SM[:, :, None] * DV + dv[None, None, :],
            mask=ok_SM[:, :, None] & (dv < DV)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_M = tl.maximum(top_M, tl.max(lse_SM, 0))
        safe_M = tl.where(new_M == float("-inf"), 0.0, new_M)
        old_M = tl.exp2(top_M - safe_M)
        weight_SM = tl.exp2(lse_SM - safe_M[None, :])
        acc_MD = acc_MD * old_M[:, None] + tl.sum(part_SMD * weight_SM[:, :, None], 0)
        sum_M = sum_M * old_M + tl.sum(weight_SM, 0)
        top_M = new_M
    return acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]


@triton.jit
def combine(
    partial_ptr, lse_ptr, out_ptr, first_item, splits, stride, out_stride, head, request, num_rows,
    first_m, GROUP: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A request's rows first_m .. first_m + BLOCK_M - 1 of one head, ROWS at a time.

    partial_ptr, lse_ptr: at this head of item 0; stride: rows from one item to the next.
    """
    dv = tl.arange(0, BLOCK_DV)
    for start in range(first_m, tl.minimum(first_m + BLOCK_M, num_rows * GROUP), ROWS):
        m = start + tl.arange(0, ROWS)
        ok_M = m < num_rows * GROUP
        out_MD = _weigh(
            partial_ptr, lse_ptr, first_item * stride, splits, stride, m, ok_M, DV, ROWS, BLOCK_DV,
            SPLITS,
        )  # fmt: skip
        token_M = (request * num_rows + m // GROUP).to(tl.int64)
        place_M = token_M * out_stride + (head * GROUP + m % GROUP) * DV
        ok_MD = ok_M[:, None] & (dv < DV)[None, :]
        tl.store(
            out_ptr + place_M[:, None] + dv[None, :],
            out_MD.to(out_ptr.dtype.element_ty),
            mask=ok_MD,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _combine_kernel(
    partial_ptr, lse_ptr, out_ptr, spans_ptr, num_rows, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS (row, query head) pairs of a key/value head of a request."""
    let_next_start(PDL)
    head, request = tl.program_id(1), tl.program_id(2)
    # The plan is complete: the kernel before this one let it start only after its own wait.
    first_item = tl.load(spans_ptr + request * 2)
    splits = tl.load(spans_ptr + request * 2 + 1).to(tl.int32)
    wait_for_inputs(PDL)
    if splits > 1:
        num_pairs = num_rows * GROUP
        combine(
            partial_ptr + head * num_pairs * DV, lse_ptr + head * num_pairs, out_ptr, first_item,
            splits, NUM_KV_HEADS * num_pairs, NUM_KV_HEADS * GROUP * DV, head, request, num_rows,
            tl.program_id(0) * ROWS, GROUP, DV, ROWS, ROWS, BLOCK_DV, SPLITS,
        )  # fmt: skip


def tile(num_pairs: int, block_dv: int, num_warps: int) -> tuple[int, int]:
    """(pairs, splits) that one program adds at once: 32 numbers a thread."""
    most = 1024 * num_warps // block_dv
    rows = max(1, min(triton.next_power_of_2(num_pairs), most // 2))
    return rows, max(1, min(16, most // rows))


def combine_rows(
    partials: tuple[Tensor, Tensor],
    out_TE: Tensor,
    spans_B2: Tensor,
    *,
    num_rows: int,
    num_kv_heads: int,
    num_groups: int,
) -> None:
    """Fill the rows of out_TE [T, H * Dv] whose requests were split. partials: (results, their
    log-sum-exp) of [I, K, Q * G] rows. spans_B2: first item and splits of each request."""
    v_size = out_TE.shape[1] // (num_kv_heads * num_groups)
    num_pairs, block_dv = num_rows * num_groups, triton.next_power_of_2(max(v_size, 16))
    # Few programs where requests are many: these are seldom split.
    rows = min(16, triton.next_power_of_2(max(1, len(spans_B2) * num_kv_heads * num_pairs // 1024)))
    rows = min(rows, triton.next_power_of_2(num_pairs))
    _combine_kernel[(triton.cdiv(num_pairs, rows), num_kv_heads, len(spans_B2))](
        *partials,
        out_TE,
        spans_B2,
        num_rows,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_groups,
        DV=v_size,
        ROWS=rows,
        BLOCK_DV=block_dv,
        SPLITS=max(1, min(16, 4096 // (rows * block_dv))),
        num_warps=4,
        **launch_options(),
    )
