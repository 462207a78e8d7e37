# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Norms and gating as Triton kernels: one pass each, rounded where the reference rounds.

Shape suffixes: T rows, H hidden, I intermediate, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs

# Elements of a program's tile: short rows (heads) share one program, long ones get more warps.
_TILE, _PER_WARP, _GATED = 2048, 512, 1024


@triton.jit
def rounded_norm(x, scale, weight):
    """x times its row's scale, rounded to the weight's dtype, times weight, rounded again."""
    scaled = (x.to(tl.float32) * scale).to(weight.dtype)
    return (scaled.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    eps,
    H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row r of x begins at (r // inner) * outer_stride + (r % inner) * inner_stride; delta, total
    and out are dense."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_H)[None, :]
    is_column = column < H
    mask = (row < num_rows)[:, None] & is_column
    start = (row // inner) * outer_stride + (row % inner) * inner_stride
    dense = row[:, None] * H + column
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + start[:, None] + column, mask=mask, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + dense, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + dense, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / H + eps)[:, None]
    tl.store(out_ptr + dense, rounded_norm(x, scale, weight), mask=mask)


@triton.jit
def _pair_norm_kernel(
    token_ptr,
    embed_ptr,
    hidden_ptr,
    embed_weight_ptr,
    hidden_weight_ptr,
    out_ptr,
    embed_eps,
    hidden_eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, 0) norms the embedding of row t, (t, 1) its hidden state."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_hidden = tl.program_id(1)
    column = tl.arange(0, BLOCK_H)
    mask = column < H
    wait_for_inputs(PDL)
    if is_hidden == 1:
        x = tl.load(hidden_ptr + row * H + column, mask=mask, other=0.0)
        weight = tl.load(hidden_weight_ptr + column, mask=mask, other=0.0)
        eps = hidden_eps
    else:
        token = tl.load(token_ptr + row)
        x = tl.load(embed_ptr + token * H + column, mask=mask, other=0.0)
        weight = tl.load(embed_weight_ptr + column, mask=mask, other=0.0)
        eps = embed_eps
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    out = rounded_norm(x, scale, weight)
    tl.store(out_ptr + (2 * row + is_hidden) * H + column, out, mask=mask)


@triton.jit
def gated(gate, up):
    """silu(gate) * up of one dtype, rounded after the silu as torch does."""
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul_kernel(
    x_ptr,
    out_ptr,
    row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    wait_for_inputs(PDL)
    gate = tl.load(x_ptr + row * row_stride + column, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * row_stride + SIZE + column, mask=mask, other=0.0)
    tl.store(out_ptr + row * SIZE + column, gated(gate, up), mask=mask)


def _rows(x_TH: Tensor) -> tuple[int, int, int] | None:
    """(inner, outer stride, inner stride) of the rows, None where they are not so regular."""
    if x_TH.is_contiguous():
        return 1, x_TH.shape[-1], 0
    if x_TH.stride(-1) != 1:
        return None
    if x_TH.dim() == 2:
        return 1, x_TH.stride(0), 0
    return (x_TH.shape[1], x_TH.stride(0), x_TH.stride(1)) if x_TH.dim() == 3 else None


def _norm(
    x_TH: Tensor, delta_TH: Tensor | None, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    rows = _rows(x_TH)
    if rows is None or weight_H.dtype is not x_TH.dtype or not x_TH.numel():
        return None
    out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    total_TH = out_TH if delta_TH is None else torch.empty_like(out_TH)
    size = x_TH.shape[-1]
    num_rows, block = x_TH.numel() // size, triton.next_power_of_2(size)
    block_rows = max(min(_TILE // block, triton.next_power_of_2(num_rows)), 1)
    _norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x_TH,
        x_TH if delta_TH is None else delta_TH,
        weight_H,
        total_TH,
        out_TH,
        num_rows,
        *rows,
        eps,
        H=size,
        BLOCK_T=block_rows,
        BLOCK_H=block,
        HAS_DELTA=delta_TH is not None,
        num_warps=min(max(block_rows * block // _PER_WARP, 1), 16),
        **launch_options(),
    )
    return total_TH, out_TH


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor | None:
    """As the reference; None for a layout or dtype that is left to it."""
    both = _norm(x_TH, None, weight_H, eps)
    return None if both is None else both[1]


def add_rms_norm(
    x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    """As the reference; None for what is left to it."""
    same = x_TH.shape == delta_TH.shape and x_TH.dtype is delta_TH.dtype
    return _norm(x_TH, delta_TH, weight_H, eps) if same and delta_TH.is_contiguous() else None


def pair_norm(
    tokens_T: Tensor,
    embed_VH: Tensor,
    hidden_TH: Tensor,
    *,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]],
) -> Tensor | None:
    """As the reference; None for what is left to it."""
    (embed_weight, embed_eps), (hidden_weight, hidden_eps) = norms
    tensors = (embed_VH, hidden_TH, embed_weight, hidden_weight)
    if not all(t.is_contiguous() and t.dtype is hidden_TH.dtype for t in tensors):
        return None
    num_rows, size = hidden_TH.shape
    out_TE = torch.empty(num_rows, 2 * size, dtype=hidden_TH.dtype, device=hidden_TH.device)
    block = triton.next_power_of_2(size)
    _pair_norm_kernel[(num_rows, 2)](
        tokens_T.contiguous(),
        embed_VH,
        hidden_TH,
        embed_weight,
        hidden_weight,
        out_TE,
        embed_eps,
        hidden_eps,
        H=size,
        BLOCK_H=block,
        num_warps=min(max(block // _PER_WARP, 1), 16),
        **launch_options(),
    )
    return out_TE


def silu_mul(gate_up_TI: Tensor) -> Tensor | None:
    """As the reference; None for what is left to it."""
    width = gate_up_TI.shape[-1]
    if width % 2 or not gate_up_TI.is_contiguous() or not gate_up_TI.numel():
        return None
    out_TI = gate_up_TI.new_empty(*gate_up_TI.shape[:-1], width // 2)
    num_rows = gate_up_TI.numel() // width
    block = min(triton.next_power_of_2(width // 2), _GATED)
    _silu_mul_kernel[(num_rows, triton.cdiv(width // 2, block))](
        gate_up_TI, out_TI, width, SIZE=width // 2, BLOCK=block, num_warps=4, **launch_options()
    )
    return out_TI
