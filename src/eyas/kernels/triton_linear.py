# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Linear layers of few rows as Triton kernels that stream the weight once, near read bandwidth.

Such a layer costs the time of reading its weight; all else is fused around that: the RMSNorm of
the input before, silu(gate) * up or the residual sum after. Sums are made in fp32 in a fixed
order, so that the same rows give the same bits; results are rounded where the reference rounds.

Shape suffixes: T rows, I in features, O out features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.linear_config import LinearConfig
from eyas.kernels.triton_launch import (
    launch_options,
    let_next_start,
    prefetch,
    wait_for_inputs,
)
from eyas.kernels.triton_norm import gated, rms_norm, rounded_norm

_DTYPES = (torch.bfloat16, torch.float16)
_NORM_TILE = 16384  # elements of x that are read at once where all rows would be too much
_STREAM = "evict_first"  # each weight is read once: it should not push activations out of caches


@triton.jit
def _finished(sums, bias_ptr, out, mask, dtype, HAS_BIAS: tl.constexpr):
    """Sums of products with their bias, rounded as a linear layer's result."""
    if HAS_BIAS:
        sums += tl.load(bias_ptr + out, mask=mask, other=0.0).to(tl.float32)
    return sums.to(dtype)


@triton.jit
def _vector_product(w, x, OUT: tl.constexpr, ROWS: tl.constexpr, IN: tl.constexpr):
    """Products [OUT, ROWS, IN / 8]: the eight elements that a lane loads at once are added up."""
    products = w.to(tl.float32) * x.to(tl.float32)
    return tl.sum(tl.reshape(products, [OUT, ROWS, IN // 8, 8]), 3)


@triton.jit(do_not_specialize=["num_rows"])
def _vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    num_out,
    num_in,
    eps,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    EVEN_OUT: tl.constexpr,
    EVEN_IN: tl.constexpr,
    STREAM: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_OUT outputs of all rows; num_out counts gate and up once. Tensors are [out, row, in]:
    each thread holds eight neighbours of `in`, for all outs and rows."""
    let_next_start(PDL)
    if ROWS == 1:
        num_rows = 1
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_IN)
    is_out = (out < num_out)[:, None, None]
    weight = weight_ptr + out.to(tl.int64)[:, None, None] * num_in + column[None, None, :]
    # The other half's rows come after all of this one's.
    half = num_out.to(tl.int64) * num_in
    first = (EVEN_IN | (column < num_in))[None, None, :]
    # Programs past the end are masked only where there are any: masks cost registers.
    w_mask = first if EVEN_OUT else first & is_out
    w = tl.load(weight, mask=w_mask, other=0.0, eviction_policy=STREAM)
    w_up = w
    if IS_GATED:
        w_up = tl.load(weight + half, mask=w_mask, other=0.0, eviction_policy=STREAM)
    wait_for_inputs(PDL)
    is_row = (row < num_rows)[None, :, None]
    x_start = x_ptr + row[None, :, None] * num_in + column[None, None, :]
    scale = tl.zeros([1, ROWS, 1], tl.float32)
    if HAS_NORM:
        # In one piece, so that its loads wait together; below they come from the L1 cache.
        every = tl.arange(0, BLOCK_NORM)[None, None, :]
        place = x_ptr + row[None, :, None] * num_in + every
        wide = tl.load(place, mask=is_row & (every < num_in), other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 2) / num_in + eps)[:, :, None]
    sums = tl.zeros([BLOCK_OUT, ROWS, BLOCK_IN // 8], tl.float32)
    sums_up = tl.zeros([BLOCK_OUT, ROWS, BLOCK_IN // 8], tl.float32)
    for start in tl.range(0, num_in, BLOCK_IN):
        # The next part of the weight is on its way while this one is used.
        following = (start + BLOCK_IN + column < num_in)[None, None, :]
        w_mask = following if EVEN_OUT else following & is_out
        w_next = tl.load(weight + start + BLOCK_IN, mask=w_mask, other=0.0, eviction_policy=STREAM)
        w_up_next = w_next
        if IS_GATED:
            w_up_next = tl.load(
                weight + half + start + BLOCK_IN, mask=w_mask, other=0.0, eviction_policy=STREAM
            )
        is_in = (EVEN_IN | (start + column < num_in))[None, None, :]
        x = tl.load(x_start + start, mask=is_row & is_in, other=0.0)
        if HAS_NORM:
            norm = tl.load(norm_ptr + start + column[None, None, :], mask=is_in, other=0.0)
            x = rounded_norm(x, scale, norm)
        sums += _vector_product(w, x, BLOCK_OUT, ROWS, BLOCK_IN)
        w = w_next
        if IS_GATED:
            sums_up += _vector_product(w_up, x, BLOCK_OUT, ROWS, BLOCK_IN)
            w_up = w_up_next
    dtype = out_ptr.dtype.element_ty
    out = out[:, None]
    mask = out < num_out
    y = _finished(tl.sum(sums, 2), bias_ptr, out, mask, dtype, HAS_BIAS)
    if IS_GATED:
        y = gated(y, _finished(tl.sum(sums_up, 2), bias_ptr + num_out, out, mask, dtype, HAS_BIAS))
    place = row[None, :].to(tl.int64) * num_out + out
    mask = mask & (row < num_rows)[None, :]
    if HAS_RESIDUAL:
        y = y.to(tl.float32) + tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(dtype), mask=mask)


@triton.jit
def _matrix_product(w, x, sums, WEIGHTS_FIRST: tl.constexpr):
    if WEIGHTS_FIRST:
        sums = tl.dot(w, tl.trans(x), sums)
    else:
        sums = tl.dot(x, tl.trans(w), sums)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _matrix_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    num_out,
    num_in,
    eps,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    EVEN_OUT: tl.constexpr,
    EVEN_IN: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """As _vector_kernel, by matrix units: rows are padded to ROWS. PREFETCH: elements of each row
    of the weight that are asked for before the inputs are there."""
    let_next_start(PDL)
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_IN)
    half = num_out.to(tl.int64) * num_in
    # Outputs past the end read the last one's weights; they are not stored.
    read = out if EVEN_OUT else tl.minimum(out, num_out - 1)
    weight_rows = weight_ptr + read.to(tl.int64)[:, None] * num_in
    if PDL and PREFETCH > 0:
        ahead = tl.arange(0, PREFETCH // 64)[None, :] * 64
        prefetch(weight_rows + ahead)
        if IS_GATED:
            prefetch(weight_rows + half + ahead)
    weight = weight_rows + column[None, :]
    wait_for_inputs(PDL)
    is_row = (row < num_rows)[:, None]
    x_start = x_ptr + row[:, None] * num_in + column[None, :]
    scale = tl.zeros([ROWS, 1], tl.float32)
    if HAS_NORM:
        squares = tl.zeros([ROWS, BLOCK_NORM], tl.float32)
        for start in tl.range(0, num_in, BLOCK_NORM):
            every = start + tl.arange(0, BLOCK_NORM)[None, :]
            place = x_ptr + row[:, None] * num_in + every
            wide = tl.load(place, mask=is_row & (every < num_in), other=0.0).to(tl.float32)
            squares += wide * wide
        scale = tl.rsqrt(tl.sum(squares, 1) / num_in + eps)[:, None]
    LEFT: tl.constexpr = BLOCK_OUT if WEIGHTS_FIRST else ROWS
    RIGHT: tl.constexpr = ROWS if WEIGHTS_FIRST else BLOCK_OUT
    sums = tl.zeros([LEFT, RIGHT], tl.float32)
    sums_up = tl.zeros([LEFT, RIGHT], tl.float32)
    for start in tl.range(0, num_in, BLOCK_IN):
        is_in = (EVEN_IN | (start + column < num_in))[None, :]
        x = tl.load(x_start + start, mask=is_row & is_in, other=0.0)
        w = tl.load(weight + start, mask=is_in, other=0.0)
        if HAS_NORM:
            norm = tl.load(norm_ptr + start + column[None, :], mask=is_in, other=0.0)
            x = rounded_norm(x, scale, norm)
        sums = _matrix_product(w, x, sums, WEIGHTS_FIRST)
        if IS_GATED:
            w_up = tl.load(weight + half + start, mask=is_in, other=0.0)
            sums_up = _matrix_product(w_up, x, sums_up, WEIGHTS_FIRST)
    dtype = out_ptr.dtype.element_ty
    if WEIGHTS_FIRST:
        out = out[:, None]
        row = row[None, :]
    else:
        out = out[None, :]
        row = row[:, None]
    y = _finished(sums, bias_ptr, out, out < num_out, dtype, HAS_BIAS)
    if IS_GATED:
        up_ptr = bias_ptr + num_out
        y = gated(y, _finished(sums_up, up_ptr, out, out < num_out, dtype, HAS_BIAS))
    place = row.to(tl.int64) * num_out + out
    mask = (out < num_out) & (row < num_rows)
    if HAS_RESIDUAL:
        y = y.to(tl.float32) + tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(dtype), mask=mask)


def accepts(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether tensors of this kind are served here."""
    return x_TI.dtype in _DTYPES and x_TI.dtype is weight_OI.dtype and weight_OI.is_contiguous()


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    config: LinearConfig,
    norm: tuple[Tensor, float] | None = None,
    residual_TO: Tensor | None = None,
    is_gated: bool = False,
    only_compile: bool = False,
) -> Tensor:
    """x W^T + b for up to config.rows rows, [T, O]; bf16 or fp16.

    norm: weight [I] and eps of an RMSNorm of x before. residual_TO: added to the rounded result.
    is_gated: the halves of W are gate and up; the result is silu(gate) * up, [T, O / 2].
    only_compile: nothing runs and the result is not filled; within triton.AsyncCompileMode the
    compiler runs on its threads.
    """
    num_rows, num_in = x_TI.shape
    num_out = len(weight_OI) // 2 if is_gated else len(weight_OI)
    assert accepts(x_TI, weight_OI) and num_rows <= config.rows
    if norm is not None and config.norm_apart:
        if not only_compile:
            normed_TI = rms_norm(x_TI, *norm)
            assert normed_TI is not None
            x_TI = normed_TI
        norm = None
    x_TI = x_TI.contiguous()
    y_TO = torch.empty(num_rows, num_out, dtype=x_TI.dtype, device=x_TI.device)
    residual_TO = None if residual_TO is None else residual_TO.contiguous()
    arguments = (
        x_TI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        weight_OI if norm is None else norm[0],
        x_TI if residual_TO is None else residual_TO,
        y_TO,
        num_rows,
        num_out,
        num_in,
        0.0 if norm is None else norm[1],
    )
    options = _options(config, num_out=num_out, num_in=num_in, has_norm=norm is not None)
    options |= {
        "HAS_BIAS": bias_O is not None,
        "HAS_RESIDUAL": residual_TO is not None,
        "IS_GATED": is_gated,
    }
    kernel = _vector_kernel if config.kind == "vector" else _matrix_kernel
    grid = (triton.cdiv(num_out, config.block_out),)
    kernel.run(*arguments, grid=grid, warmup=only_compile, **options)
    return y_TO


def _options(config: LinearConfig, *, num_out: int, num_in: int, has_norm: bool) -> dict[str, Any]:
    """What a launch is specialised for, but for the form."""
    options = {
        "ROWS": config.rows,
        "BLOCK_OUT": config.block_out,
        "BLOCK_IN": config.block_in,
        "BLOCK_NORM": _norm_block(config, num_in) if has_norm else 16,
        "HAS_NORM": has_norm,
        "EVEN_OUT": num_out % config.block_out == 0,
        "EVEN_IN": num_in % config.block_in == 0,
        "num_warps": config.num_warps,
        **launch_options(),
    }
    if config.kind == "vector":
        return options | {"STREAM": _STREAM}
    return options | {
        "WEIGHTS_FIRST": config.weights_first,
        "PREFETCH": _prefetched(config, num_in),
        "num_stages": config.num_stages,
    }


def _prefetched(config: LinearConfig, num_in: int) -> int:
    """Elements of a row that the first stages of the pipeline will load, a power of two."""
    ahead = min(config.block_in * (config.num_stages - 1), num_in)
    return max(1 << (ahead.bit_length() - 1), 64) if ahead >= 64 else 0


def _norm_block(config: LinearConfig, num_in: int) -> int:
    """Elements of a row of x that are read at once for its norm."""
    whole: int = triton.next_power_of_2(num_in)
    return whole if config.kind == "vector" else min(whole, max(_NORM_TILE // config.rows, 64))
