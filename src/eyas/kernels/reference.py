"""Torch implementation of every kernel: static shapes, no host synchronisation, any device.

Shape suffixes: R rows, T tokens, B requests, N tree nodes (root first), E emitted tokens at most
(tree depth + 1), V vocabulary, H hidden, L layers, K key/value heads, D head size, S stop ids.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

NO_FINISH, FINISH_STOP, FINISH_LENGTH = 0, 1, 2

_MASK32 = 0xFFFFFFFF


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in fp32 (fp64 stays fp64), x's dtype out."""
    wide = x_TH if x_TH.dtype == torch.float64 else x_TH.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x_TH.dtype) * weight_H


def add_rms_norm(
    x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMSNorm), the sum rounded to x's dtype first."""
    total_TH = x_TH + delta_TH
    return total_TH, rms_norm(total_TH, weight_H, eps)


def apply_rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Half-split (NeoX) rotation of all heads; cos and sin in x's dtype.

    The first half of sin is negated: rotating halves is then one roll and no negation. Only the
    first cos.shape[-1] elements of a head are rotated (partial rotary).
    """
    size = cos_T1D.shape[-1]
    if size == x_THD.shape[-1]:
        return torch.addcmul(x_THD * cos_T1D, x_THD.roll(size // 2, -1), sin_T1D)
    rotated = apply_rope(x_THD[..., :size], cos_T1D, sin_T1D)
    return torch.cat((rotated, x_THD[..., size:]), dim=-1)


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up of a fused [T, 2I] projection -> [T, I]."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return F.silu(gate) * up


def _mix32(x: Tensor) -> Tensor:
    """A 32-bit integer hash (constants by C. Wellons' hash-prospector, bias 0.107).

    Works in int64; both constants are below 2^31, so that no product overflows.
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK32
    return x ^ (x >> 15)


def gumbel_noise(seed_R: Tensor, position_R: Tensor, token_V: Tensor) -> Tensor:
    """Standard Gumbel noise [R, V] in fp32 as a pure function of (seed, position, token).

    seed_R, position_R: int64 [R]; token_V: int64 [V], target token ids, so that a draft with a
    reduced vocabulary sees the target's noise. Counter-based: no generator state, hence the same
    in any batch and with any tree (design D9).
    """
    low, high = seed_R & _MASK32, (seed_R >> 32) & _MASK32
    key_a = _mix32(_mix32(low ^ 0x5851F42D) ^ high)
    key_a = _mix32((key_a + position_R * 0x1E3779B1) & _MASK32)
    key_b = _mix32(key_a ^ 0x2545F491)
    bits = _mix32(_mix32(token_V[None, :] ^ key_a[:, None]) ^ key_b[:, None])
    # Uniform near 0 has the fine steps of a small float; near 1 it must not round to 1.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return torch.log1p(-uniform).neg_().log_().neg_()


def choose_tokens(
    logits_RV: Tensor,
    temperature_R: Tensor,
    noise_RV: Tensor | None,
) -> Tensor:
    """y = argmax(logits / T + G) per row, greedy where T is 0; int64 [R] (design D9).

    noise_RV None: every row is greedy.
    """
    if noise_RV is None:
        return logits_RV.argmax(-1)
    sampled_R1 = (temperature_R > 0)[:, None]
    temperature_R1 = torch.where(sampled_R1, temperature_R[:, None], 1.0)
    scores = logits_RV.float() / temperature_R1
    return (scores + torch.where(sampled_R1, noise_RV, 0.0)).argmax(-1)


def walk_tree(
    token_BN: Tensor, parent_BN: Tensor, chosen_BN: Tensor, *, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root while a child carries the token chosen at its parent.

    token_BN: node tokens (root: the pending token). parent_BN: parent node index, -1 at the root
    and at unused nodes. chosen_BN: the target's token y at each node.
    Returns (path_BE, emitted_BE, num_accepted_B): nodes visited (root first; past the end the last
    node repeats), the tokens emitted there (accepted children, then the bonus token), and the
    number of drafted tokens accepted. Emitted entries past num_accepted are meaningless.
    """
    num_requests, num_nodes = token_BN.shape
    node_B = torch.zeros(num_requests, dtype=torch.int64, device=token_BN.device)
    num_accepted_B = torch.zeros_like(node_B)
    walking_B = torch.ones_like(node_B, dtype=torch.bool)
    path = [node_B]
    for _ in range(depth):
        chosen_B1 = chosen_BN.gather(1, node_B[:, None])
        match_BN = (parent_BN == node_B[:, None]) & (token_BN == chosen_B1)
        walking_B = walking_B & match_BN.any(1)
        # Siblings are distinct tokens, so at most one matches; argmax finds it.
        node_B = torch.where(walking_B, match_BN.to(torch.int8).argmax(1), node_B)
        num_accepted_B = num_accepted_B + walking_B
        path.append(node_B)
    path_BE = torch.stack(path, dim=1)
    return path_BE, chosen_BN.gather(1, path_BE), num_accepted_B


def cut_emitted(
    emitted_BE: Tensor,
    num_accepted_B: Tensor,
    *,
    stop_ids_BS: Tensor,
    remaining_B: Tensor,
    active_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Cut a round's tokens at the first stop token or length limit.

    stop_ids_BS: padded with -1. remaining_B: tokens that may still be emitted (max_tokens and the
    model length together, at least 1 for an active request). active_B: inactive rows emit nothing.
    Returns (num_emitted_B, finish_B): finish is NO_FINISH, FINISH_STOP or FINISH_LENGTH. A stop
    token that is the last one allowed ends as a stop.
    """
    width = emitted_BE.shape[1]
    index_E = torch.arange(width, device=emitted_BE.device)
    is_stop_BE = (emitted_BE[:, :, None] == stop_ids_BS[:, None, :]).any(2)
    first_stop_B = torch.where(is_stop_BE, index_E, width).amin(1)
    num_B = torch.minimum(num_accepted_B + 1, remaining_B)
    stopped_B = first_stop_B < num_B
    num_emitted_B = torch.where(stopped_B, first_stop_B + 1, num_B)
    finish_B = torch.where(num_emitted_B >= remaining_B, FINISH_LENGTH, NO_FINISH)
    finish_B = torch.where(stopped_B, FINISH_STOP, finish_B)
    return num_emitted_B * active_B, finish_B * active_B


def copy_kv_rows(pool_LRKD: Tensor, source_T: Tensor, target_T: Tensor) -> None:
    """pool[:, target] = pool[:, source] for all layers; rows may repeat only in the trash page."""
    pool_LRKD.index_copy_(1, target_T, pool_LRKD.index_select(1, source_T))
