"""Which implementation runs: by device, dtype and layout of the tensors, and by the work.

Shape suffixes: T rows, H hidden, I intermediate, R rows of the cache, B requests, Q query rows a
request, S rows read, K key/value heads, D head size.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.kernels import native, native_attention, native_round, reference
from eyas.kernels.linear_config import LinearConfig


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: import their modules only where they do."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _takes_triton(x: Tensor) -> bool:
    """Whether a tensor's kind is served by Triton's norms and gating at this moment."""
    if not x.is_cuda or x.dtype is torch.float64 or torch.is_grad_enabled():
        return False
    return type(x) is Tensor and has_triton(x.device)


def has_native(device: torch.device) -> bool:
    """Whether C kernels run on a device; builds them at the first call."""
    return device.type == "cpu" and native.status().startswith("native")


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in fp32 (fp64 stays fp64), x's dtype out."""
    if native.accepts(x_TH):
        out_TH = native.rms_norm(x_TH, weight_H, eps)
        if out_TH is not None:
            return out_TH
    if _takes_triton(x_TH):
        from eyas.kernels import triton_norm

        out_TH = triton_norm.rms_norm(x_TH, weight_H, eps)
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
    if _takes_triton(x_TH):
        from eyas.kernels import triton_norm

        both = triton_norm.add_rms_norm(x_TH, delta_TH, weight_H, eps)
        if both is not None:
            return both
    return reference.add_rms_norm(x_TH, delta_TH, weight_H, eps)


def pair_norm(
    tokens_T: Tensor,
    embed_VH: Tensor,
    hidden_TH: Tensor,
    *,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]],
) -> Tensor:
    """[norm(embedding of the token), norm(hidden)], [T, 2H]; norms: (weight [H], eps) of each."""
    if _takes_triton(hidden_TH):
        from eyas.kernels import triton_norm

        out_TE = triton_norm.pair_norm(tokens_T, embed_VH, hidden_TH, norms=norms)
        if out_TE is not None:
            return out_TE
    embedded_TH = F.embedding(tokens_T, embed_VH)
    halves = [rms_norm(x, *norm) for x, norm in zip((embedded_TH, hidden_TH), norms, strict=True)]
    return torch.cat(halves, dim=-1)


def few_row_linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    config: LinearConfig,
    norm: tuple[Tensor, float] | None = None,
    residual_TO: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """triton_linear.linear, for those whom a plan has given a configuration."""
    from eyas.kernels import triton_linear

    return triton_linear.linear(
        x_TI,
        weight_OI,
        bias_O,
        config=config,
        norm=norm,
        residual_TO=residual_TO,
        is_gated=is_gated,
    )


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up of a fused [T, 2I] projection -> [T, I]."""
    if native.accepts(gate_up_TI):
        out_TI = native.silu_mul(gate_up_TI)
        if out_TI is not None:
            return out_TI
    if _takes_triton(gate_up_TI):
        from eyas.kernels import triton_norm

        out_TI = triton_norm.silu_mul(gate_up_TI)
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
) -> native_attention.RopeWriter | None:
    """One call a layer that rotates q and k and stores k and v, or None where there is none.

    qkv_TE: a layer's fused projection [T, (H + K) * D + K * Dv]; cache: its keys and values.
    """
    same = qkv_TE.dtype is cache[0].dtype is rotary[0].dtype
    if not same or qkv_TE.numel() > native.MAX_ELEMENTS or not native.accepts(qkv_TE):
        return None
    return native_attention.RopeWriter(rotary, write_T, cache, num_heads=num_heads)


def plan_attention(
    q_THD: Tensor,
    read: tuple[Tensor, Tensor] | native_attention.TreeRows,
    cache: tuple[Tensor, Tensor],
) -> native_attention.FewRowsAttention | None:
    """Attention that gathers nothing, or None where the reference is as good or better.

    read: rows [B * S] and what is added to their scores [B, Q, S]; or a tree.
    """
    if isinstance(read, native_attention.TreeRows):
        (num_requests, num_queries, num_read), dtype = read.shape, q_THD.dtype
    else:
        (num_requests, num_queries, num_read), dtype = read[1].shape, read[1].dtype
    if num_queries > native_attention.MAX_QUERIES:  # a prompt chunk: torch's threads pay there
        return None
    work = num_requests * num_queries * num_read
    work *= q_THD.shape[1] * (q_THD.shape[2] + cache[1].shape[2])
    if work > native_attention.max_attention_work() or not native.accepts(q_THD):
        return None
    if not q_THD.dtype is cache[0].dtype is dtype:
        return None
    return native_attention.FewRowsAttention(q_THD, read, cache)


def plan_tree_rows(
    page_table_BP: Tensor,
    slots_B: Tensor,
    end_B: Tensor,
    visible_BQN: Tensor,
    *,
    first_index: int,
    last_index: int,
    first_node: int,
    page_size: int,
    scratch: tuple[int, int],
) -> native_attention.TreeRows | None:
    """The rows of trees straight from their page tables, or None where torch finds them.

    end_B: where each prefix ends, none above last_index. scratch: the first scratch row of all
    slots, and how many one has.
    """
    is_small = visible_BQN.shape[1] <= native_attention.MAX_QUERIES
    if not is_small or not native.accepts_indices(page_table_BP):
        return None
    return native_attention.TreeRows(
        page_table_BP,
        slots_B,
        end_B,
        visible_BQN,
        first_index=first_index,
        last_index=last_index,
        first_node=first_node,
        page_size=page_size,
        scratch=scratch,
    )


def copy_cache_rows(
    pools: Sequence[Tensor], source_T: Tensor, destination_T: Tensor, *, trash_row: int
) -> None:
    """pool[:, destination] = pool[:, source] for all layers of some pools [L, R, K, D].

    No row may be both source and destination. Nobody reads the trash row: what would go there may
    be left out.
    """
    if has_triton(source_T.device):
        from eyas.kernels import triton_round

        triton_round.copy_rows(pools, source_T, destination_T, trash_row=trash_row)
        return
    if native.accepts_indices(source_T) and all(pool.is_contiguous() for pool in pools):
        for pool_LRKD in pools:
            native_round.copy_rows(pool_LRKD, source_T, destination_T, trash_row=trash_row)
        return
    for pool_LRKD in pools:
        reference.copy_kv_rows(pool_LRKD, source_T, destination_T)
