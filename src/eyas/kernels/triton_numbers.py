# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Device functions that several Triton kernels share: the noise, and keys that order by value.

They follow `reference.gumbel_noise` bit for bit in its integers; its logarithms may differ in the
last places.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(2**63))  # below the key of any value, NaN and -inf included


@triton.jit
def mix32(
    x,
):
    """`reference._mix32` on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def noise_keys(
    seed,
    position,
):
    """The two keys of a row's noise from its int64 seed and position."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    key_a = mix32(mix32(low ^ 0x5851F42D) ^ high)
    key_a = mix32(key_a + position.to(tl.uint32) * 0x1E3779B1)
    return key_a, mix32(key_a ^ 0x2545F491)


@triton.jit
def uniform(
    key_a,
    key_b,
    token,
):
    """The noise's uniform number: above 0, at most 1 - 2^-24."""
    bits = mix32(mix32(token.to(tl.uint32) ^ key_a) ^ key_b)
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def gumbel(
    key_a,
    key_b,
    token,
):
    """Standard Gumbel noise of tokens, fp32."""
    u = uniform(key_a, key_b, token)
    # -log1p(-u): what rounding takes from 1 - u is given back as a factor.
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / lost))
    return -tl.log(exponential)


@triton.jit
def value_order(
    x,
):
    """int32 that orders as fp32 x does; both zeros are equal and NaN is above all, as in argmax."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, bits)


@triton.jit
def order_value(
    order,
):
    """The fp32 of an int32 made by `value_order`."""
    bits = tl.where(order >= 0, order, order ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def make_key(
    x,
    index,
):
    """int64 whose maximum is the largest x, the lowest index first among equals."""
    low = (0x7FFFFFFF - index).to(tl.int64)
    return (value_order(x).to(tl.int64) << 32) | low


@triton.jit
def best_key(x, index, inside):
    """The largest of the keys of a block, or LOWEST_KEY if nothing is inside. Two reductions of 32
    bits cost less than making a key of every element; NaN counts as inf here."""
    x = tl.where(inside, tl.where(x == x, x, float("inf")), float("-inf"))
    best = tl.max(x, axis=0)
    first = tl.min(tl.where(inside & (x == best), index, 0x7FFFFFFF), axis=0)
    return tl.where(first < 0x7FFFFFFF, make_key(best, first), LOWEST_KEY)


@triton.jit
def key_index(
    key,
):
    """The index of a key, int32."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def key_value(
    key,
):
    """The fp32 of a key."""
    return order_value((key >> 32).to(tl.int32))
