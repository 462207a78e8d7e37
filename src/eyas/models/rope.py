"""Rotary frequencies of every scaling kind, with the defaults that transformers gives them.

Frequencies are [dim / 2], fp32: half of the rotated part of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eyas.models.config import RopeConfig


def rope_frequencies(rope: RopeConfig, dim: int, *, stretch: float) -> Tensor:
    """Inverse frequencies for `dim` rotated elements of a head.

    stretch: served length over max_position_embeddings, at least 1; only "dynamic" reads it.
    Raises ValueError on an unknown kind.
    """
    theta = rope.theta
    if rope.kind == "dynamic":
        # NTK-aware: the base grows so that the longest served length fits the trained range.
        theta *= (_factor(rope) * stretch - (_factor(rope) - 1)) ** (dim / (dim - 2))
    inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind in ("default", "dynamic"):
        return inv_freq
    if rope.kind == "linear":
        return inv_freq / _factor(rope)
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    if rope.kind == "yarn":
        return _yarn(inv_freq, rope, dim)
    raise ValueError(f"rope type {rope.kind!r} is not implemented")


def _factor(rope: RopeConfig) -> float:
    assert rope.factor is not None, "the config reader requires a factor"
    return rope.factor


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, with a ramp between two borders."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    original = rope.original_max_position_embeddings
    assert low is not None and high is not None and original is not None
    wavelength = 2 * math.pi / inv_freq
    ramp = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * (inv_freq / _factor(rope)) + ramp * inv_freq


def _yarn(inv_freq: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """YaRN (Peng et al., 2023, section 3.2): interpolate slow dimensions, keep fast ones."""
    original = rope.original_max_position_embeddings
    assert original is not None

    def dimension(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate is None or rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high > low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return inv_freq / _factor(rope) * ramp + inv_freq * (1 - ramp)


def yarn_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: YaRN's temperature, with DeepSeek's mscale weights."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope, rope.mscale) / _mscale(rope, rope.mscale_all_dim)
    return _mscale(rope, 1.0)


def latent_softmax_scale(rope: RopeConfig, head_dim: int) -> float:
    """What latent attention multiplies its scores by: 1 / sqrt(head_dim), and with a scaled
    rotation the square of DeepSeek's mscale, for the part of a head that is not rotated too."""
    scale = 1.0 / math.sqrt(head_dim)
    if rope.kind == "default" or not rope.mscale_all_dim:
        return scale
    return scale * _mscale(rope, rope.mscale_all_dim) ** 2


def _mscale(rope: RopeConfig, weight: float) -> float:
    factor = _factor(rope)
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
