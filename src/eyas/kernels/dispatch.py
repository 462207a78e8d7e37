"""Which implementation runs: by device, dtype and layout of the tensors, and by the work.

Shape suffixes: T rows, H hidden, I intermediate, R rows of the cache, B requests, Q query rows a
request, S rows read, K key/value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor

from eyas.kernels import native, reference


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in fp32 (fp64 stays fp64), x's dtype out."""
    if native.accepts(x_TH):
        out_TH = native.rms_norm(x_TH, weight_H, eps)
        if out_TH is not None:
            return out_TH
    return reference.rms_norm(x_TH, weight_H, eps)


def add_rms_norm(
    x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMSNorm): the step from one half of a block to the next."""
    if native.accepts(x_TH):
        both = native.add_rms_norm(x_TH, delta_TH, weight_H, eps)
        if both is not None:
            return both
    return reference.add_rms_norm(x_TH, delta_TH, weight_H, eps)


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up of a fused [T, 2I] projection -> [T, I]."""
    if native.accepts(gate_up_TI):
        out_TI = native.silu_mul(gate_up_TI)
        if out_TI is not None:
            return out_TI
    return reference.silu_mul(gate_up_TI)


def choose_tokens(logits_RV: Tensor, temperature_R: Tensor, noise_RV: Tensor | None) -> Tensor:
    """y = argmax(logits / T + G) per row, greedy where T is 0; int64 [R] (design D9).

    noise_RV None: every row is greedy.
    """
    if noise_RV is None and native.accepts(logits_RV):
        chosen_R = native.argmax(logits_RV)
        if chosen_R is not None:
            return chosen_R
    return reference.choose_tokens(logits_RV, temperature_R, noise_RV)


def plan_rope_write(
    qkv_TE: Tensor,
    rotary: tuple[Tensor, Tensor],
    write_T: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    num_heads: int,
) -> native.RopeWriter | None:
    """One call a layer that rotates q and k and stores k and v, or None where there is none.

    qkv_TE: a layer's fused projection [T, (H + K) * D + K * Dv]; cache: its keys and values.
    """
    same = qkv_TE.dtype is cache[0].dtype is rotary[0].dtype
    if not same or qkv_TE.numel() > native.MAX_ELEMENTS or not native.accepts(qkv_TE):
        return None
    return native.RopeWriter(rotary, write_T, cache, num_heads=num_heads)


def plan_attention(
    q_THD: Tensor, read_T: Tensor, bias_BQS: Tensor, cache: tuple[Tensor, Tensor]
) -> native.FewRowsAttention | None:
    """Attention that gathers nothing, or None where the reference is as good or better."""
    if bias_BQS.shape[1] > native.MAX_QUERIES:  # a prompt chunk: torch's threads pay there
        return None
    width = q_THD.shape[1] * (q_THD.shape[2] + cache[1].shape[2])
    if bias_BQS.numel() * width > native.max_attention_work() or not native.accepts(q_THD):
        return None
    if not q_THD.dtype is cache[0].dtype is bias_BQS.dtype:
        return None
    return native.FewRowsAttention(q_THD, read_T, bias_BQS, cache)
