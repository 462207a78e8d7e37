# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Triton: rotate a fused projection's q and k (with their norms), store k and v in the cache.

Needs Triton; imported only where its backend runs. The oracle is kernels.reference.apply_rope
(and rms_norm) with torch's index_copy_.

Shape suffixes: T rows, E elements of a projected row, R rows of the cache, H query heads,
K key/value heads, D head size.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs

_HEADS_PER_PROGRAM = 8


@triton.jit
def load_rotated(
    base, d, ok, cos_row, sin_row, norm_ptr, eps, D: tl.constexpr, ROT: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Rotated rows [R, D] in fp32. base: pointers [R, 1] to the rows; ok: [R, D]; cos_row,
    sin_row: pointers [R, 1] or [1, 1]. The first half of sin is negated (kernels.apply_rope)."""
    half: tl.constexpr = ROT // 2
    # The partner of an element comes from memory once more: cheaper than a shuffle of registers.
    partner = tl.where(d < half, d + half, tl.where(d < ROT, d - half, d))
    x = tl.load(base + d[None, :], mask=ok, other=0.0)
    y = tl.load(base + partner[None, :], mask=ok, other=0.0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        weight = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        weight_y = tl.load(norm_ptr + partner, mask=d < D, other=0.0).to(tl.float32)
        # Rounded where the reference rounds.
        x = ((x * scale).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * weight_y[None, :]).to(dtype).to(tl.float32)
    turned = ok & (d < ROT)[None, :]
    cos = tl.load(cos_row + d[None, :], mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_row + d[None, :], mask=turned, other=0.0).to(tl.float32)
    return x * cos + y * sin


@triton.jit
def _rotate_heads(
    source, target, first, cos_row, sin_row, norm_ptr, eps, NUM: tl.constexpr, D: tl.constexpr,
    ROT: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Heads first .. first + HEADS - 1 of one row, rotated, to the target's row."""
    head, d = first + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    ok = (head < NUM)[:, None] & (d < D)[None, :]
    base = source + (head * D)[:, None]
    x = load_rotated(base, d, ok, cos_row, sin_row, norm_ptr, eps, D, ROT, HAS_NORM)
    place = target + (head * D)[:, None] + d[None, :]
    tl.store(place, x.to(target.dtype.element_ty), mask=ok)


@triton.jit
def _copy_heads(
    source, target, first, NUM: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, d = first + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    ok = (head < NUM)[:, None] & (d < D)[None, :]
    place = (head * D)[:, None] + d[None, :]
    x = tl.load(source + place, mask=ok, other=0.0)
    tl.store(target + place, x.to(target.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["eps"])
def _rotate_write_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, write_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    qkv_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, ROT: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some heads of one row, all of them queries, keys or values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.load(write_ptr + token)
    source = qkv_ptr + token * qkv_stride
    cos_row = cos_ptr + token * ROT + tl.zeros([1, 1], tl.int32)
    sin_row = sin_ptr + token * ROT + tl.zeros([1, 1], tl.int32)
    if part < q_parts:
        _rotate_heads(
            source, q_ptr + token * (NUM_HEADS * D), part * HEADS, cos_row, sin_row, q_norm_ptr,
            eps, NUM_HEADS, D, ROT, HEADS, BLOCK_D, HAS_NORM,
        )  # fmt: skip
    elif part < q_parts + kv_parts:
        _rotate_heads(
            source + NUM_HEADS * D, k_ptr + row * (NUM_KV_HEADS * D), (part - q_parts) * HEADS,
            cos_row, sin_row, k_norm_ptr, eps, NUM_KV_HEADS, D, ROT, HEADS, BLOCK_D, HAS_NORM,
        )  # fmt: skip
    else:
        _copy_heads(
            source + (NUM_HEADS + NUM_KV_HEADS) * D, v_ptr + row * (NUM_KV_HEADS * DV),
            (part - q_parts - kv_parts) * HEADS, NUM_KV_HEADS, DV, HEADS, BLOCK_DV,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rotation:
    """What turns projected rows into queries and keys.

    cos_T1D, sin_T1D: as kernels.apply_rope takes them, contiguous; fewer than D elements rotate
    the first ones only. q_norm_D, k_norm_D: RMSNorm weights of the heads, or None. eps: theirs.
    """

    cos_T1D: Tensor
    sin_T1D: Tensor
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    eps: float = 0.0

    @property
    def size(self) -> int:
        """Rotated elements of a head."""
        return self.cos_T1D.shape[-1]

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        """Kernel arguments; where there is no norm, its pointers are never read."""
        q_norm = self.cos_T1D if self.q_norm_D is None else self.q_norm_D
        k_norm = self.cos_T1D if self.k_norm_D is None else self.k_norm_D
        return self.cos_T1D, self.sin_T1D, q_norm, k_norm, self.eps


def rotate_write(
    qkv_TE: Tensor,
    rotation: Rotation,
    write_T: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    num_heads: int,
) -> Tensor:
    """q [T, H, D], rotated; k (rotated) and v go to rows write_T of the cache ([R, K, D] each).

    qkv_TE: [T, H * D + K * D + K * Dv], rows of unit stride; H may be 0, for keys and values alone.
    """
    k_RKD, v_RKD = cache
    num_kv_heads, size = k_RKD.shape[1:]
    num_tokens, v_size = len(qkv_TE), v_RKD.shape[2]
    q_THD = qkv_TE.new_empty(num_tokens, num_heads, size)
    heads = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    parts = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    if num_tokens:
        _rotate_write_kernel[(num_tokens, parts)](
            qkv_TE,
            q_THD,
            k_RKD,
            v_RKD,
            write_T,
            *rotation.arguments(),
            qkv_TE.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            D=size,
            DV=v_size,
            ROT=rotation.size,
            HEADS=heads,
            BLOCK_D=triton.next_power_of_2(size),
            BLOCK_DV=triton.next_power_of_2(v_size),
            HAS_NORM=rotation.q_norm_D is not None,
            num_warps=4,
            **launch_options(),
        )
    return q_THD


@triton.jit
def _store_rows_kernel(
    k_in_ptr, v_in_ptr, k_ptr, v_ptr, write_ptr, k_token_stride, k_head_stride, v_token_stride,
    v_head_stride, D: tl.constexpr, DV: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(write_ptr + token)
    head, d, dv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    some = (head < NUM_KV_HEADS)[:, None]
    ok = some & (d < D)[None, :]
    base = k_in_ptr + token * k_token_stride + (head * k_head_stride)[:, None]
    k = tl.load(base + d[None, :], mask=ok, other=0.0)
    target = k_ptr + (row * NUM_KV_HEADS + head)[:, None] * D + d[None, :]
    tl.store(target, k.to(k_ptr.dtype.element_ty), mask=ok)
    ok = some & (dv < DV)[None, :]
    base = v_in_ptr + token * v_token_stride + (head * v_head_stride)[:, None]
    v = tl.load(base + dv[None, :], mask=ok, other=0.0)
    target = v_ptr + (row * NUM_KV_HEADS + head)[:, None] * DV + dv[None, :]
    tl.store(target, v.to(v_ptr.dtype.element_ty), mask=ok)


def store_rows(k_TKD: Tensor, v_TKD: Tensor, write_T: Tensor, cache: tuple[Tensor, Tensor]) -> None:
    """Store keys and values at rows write_T of the cache, in one launch."""
    k_RKD, v_RKD = cache
    if not len(k_TKD):
        return
    _store_rows_kernel[(len(k_TKD),)](
        k_TKD,
        v_TKD,
        k_RKD,
        v_RKD,
        write_T,
        *k_TKD.stride()[:2],
        *v_TKD.stride()[:2],
        D=k_RKD.shape[2],
        DV=v_RKD.shape[2],
        NUM_KV_HEADS=k_RKD.shape[1],
        BLOCK_K=triton.next_power_of_2(k_RKD.shape[1]),
        BLOCK_D=triton.next_power_of_2(k_RKD.shape[2]),
        BLOCK_DV=triton.next_power_of_2(v_RKD.shape[2]),
        num_warps=4,
    )


def unit_rows(x_THD: Tensor) -> Tensor:
    """The tensor itself where its last dimension has stride 1, else a copy."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


def supports(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether these kernels serve a cache of that dtype and those head sizes."""
    return dtype in (torch.float16, torch.bfloat16, torch.float32) and all(
        0 < size <= 256 for size in sizes
    )
