"""Attention over packed documents, without a cache: for capturing, and for training-time test.

At step 0 a row attends to the rows of its own document up to itself. At step k it attends to those
same step-0 keys and to the keys that it wrote itself at steps 1..k, under one softmax (Li et al.,
"EAGLE-3" (2025), section 3.2). That is what a served draft sees: committed pairs, then a chain.

One softmax over two kinds of keys needs no mask and no longer key list. The causal part comes from
a flash kernel together with its log-sum-exp; the diagonal part is one product per row and step;
the two are weighed by the joint log-sum-exp. A flash kernel's backward reads only the output and
the log-sum-exp, and given the *joint* ones it returns exactly the causal part's gradients, since
d(score) = p * (d(p) - sum(d(out) * out)) holds for every key of the softmax alike. So the cost is
that of S causal passes, memory is linear in the length, and padding between documents is not
needed.

Shape suffixes: T rows, H query heads, K key/value heads, G = H / K, D head size, J diagonal keys.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.contract.attention import KVLayout
from eyas.train.causal_cores import (
    CausalCore,
    CpuFlash,
    Documents,
    Plain,
    Plan,
    VarlenFlash,
    wide_dtype,
)

_LOG = logging.getLogger(__name__)


class _JointSoftmax(torch.autograd.Function):
    """Causal step-0 keys and diagonal keys under one softmax. diagonals: k, v, k, v, ..."""

    @staticmethod
    def forward(
        ctx: Any,
        core: CausalCore,
        plan: Plan,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *diagonals: Tensor,
    ) -> Tensor:
        out_THD, lse_HT, extra = core.forward(q_THD, k_TKD, v_TKD, plan)
        score_JTKG = q_THD.new_empty(0)
        if diagonals:
            out_THD, lse_HT, score_JTKG = _add_diagonals(
                q_THD, (out_THD, lse_HT), diagonals, plan.scale
            )
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, lse_HT, score_JTKG, *extra, *diagonals)
        ctx.core, ctx.plan, ctx.num_extra = core, plan, len(extra)
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, out_THD, lse_HT, score_JTKG, *rest = ctx.saved_tensors
        extra, diagonals = tuple(rest[: ctx.num_extra]), rest[ctx.num_extra :]
        grad_THD = grad_THD.contiguous()
        dq, dk, dv = ctx.core.backward(
            grad_THD, (q_THD, k_TKD, v_TKD), (out_THD, lse_HT, extra), ctx.plan
        )
        if not diagonals:
            return None, None, dq, dk, dv
        extra_dq, grads = _differentiate_diagonals(
            grad_THD, q_THD, (out_THD, lse_HT, score_JTKG), diagonals, ctx.plan.scale
        )
        return None, None, dq + extra_dq, dk, dv, *grads


def _add_diagonals(
    q_THD: Tensor, causal: tuple[Tensor, Tensor], diagonals: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(joint output, joint log-sum-exp, diagonal scores), computed wide."""
    out_THD, lse_HT = causal
    num_rows, num_kv_heads, head_dim = diagonals[0].shape
    q_TKGD = q_THD.to(wide_dtype(q_THD)).view(num_rows, num_kv_heads, -1, head_dim)
    scores = [(q_TKGD * k_TKD[:, :, None]).sum(-1) * scale for k_TKD in diagonals[::2]]
    lse_TKG = lse_HT.t().reshape(num_rows, num_kv_heads, -1)
    joint_TKG = torch.stack([lse_TKG, *scores]).logsumexp(0)
    out_TKGD = out_THD.view_as(q_TKGD) * (lse_TKG - joint_TKG).exp_()[..., None]
    for score_TKG, v_TKD in zip(scores, diagonals[1::2], strict=True):
        out_TKGD.addcmul_((score_TKG - joint_TKG).exp_()[..., None], v_TKD[:, :, None])
    out_THD = out_TKGD.view(q_THD.shape).to(q_THD.dtype)
    return out_THD, joint_TKG.view(num_rows, -1).t().contiguous(), torch.stack(scores)


def _differentiate_diagonals(
    grad_THD: Tensor,
    q_THD: Tensor,
    result: tuple[Tensor, Tensor, Tensor],
    diagonals: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, list[Tensor]]:
    """(the diagonals' share of dq, then dk, dv of each)."""
    out_THD, lse_HT, score_JTKG = result
    num_rows, num_kv_heads, head_dim = diagonals[0].shape
    grouped = (num_rows, num_kv_heads, -1, head_dim)
    wide = wide_dtype(q_THD)
    q_TKGD, grad_TKGD = q_THD.to(wide).view(grouped), grad_THD.to(wide).view(grouped)
    delta_TKG = (grad_TKGD * out_THD.view(grouped)).sum(-1)
    weight_JTKG = (score_JTKG - lse_HT.t().reshape(delta_TKG.shape)).exp_()
    dq_TKGD, grads = torch.zeros_like(q_TKGD), []
    keys, values = diagonals[::2], diagonals[1::2]
    for weight_TKG, k_TKD, v_TKD in zip(weight_JTKG, keys, values, strict=True):
        ds_TKG = (grad_TKGD * v_TKD[:, :, None]).sum(-1).sub_(delta_TKG).mul_(weight_TKG)
        ds_TKG1 = ds_TKG.mul_(scale)[..., None]
        dq_TKGD.addcmul_(ds_TKG1, k_TKD[:, :, None])
        grads.append((ds_TKG1 * q_TKGD).sum(2).to(k_TKD.dtype))
        grads.append((weight_TKG[..., None] * grad_TKGD).sum(2).to(v_TKD.dtype))
    return dq_TKGD.view(q_THD.shape).to(q_THD.dtype), grads


def joint_attention(
    core: CausalCore,
    plan: Plan,
    q_THD: Tensor,
    causal: tuple[Tensor, Tensor],
    diagonals: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """[T, H, D] of queries over causal (k, v) and each row's own diagonal (k, v) pairs, one
    softmax; differentiable in all of them."""
    flat = itertools.chain.from_iterable(diagonals)
    out: Tensor = _JointSoftmax.apply(core, plan, q_THD, *causal, *flat)  # type: ignore[no-untyped-call]
    return out


class CausalAttention:
    """contract.attention.Attention for one forward over packed documents; keeps one layer's keys
    only, and nothing for a backward. layout: of the model's keys and values."""

    def __init__(self, documents: Documents, layout: KVLayout) -> None:
        self._documents, self._layout = documents, layout
        self._kv: tuple[Tensor, Tensor] | None = None

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Keep this layer's keys and values for the `attend` that follows."""
        if self._layout.value_in_key:
            v_TKD = k_TKD[..., : self._layout.value_in_key]
        self._kv = k_TKD.contiguous(), v_TKD.contiguous()

    def attend(self, layer: int, q_THD: Tensor, *, scale: float | None = None) -> Tensor:
        """Causal by document; [T, H * Dv]."""
        assert self._kv is not None, "attend comes after write"
        core = choose_core(q_THD, *self._kv)
        plan = _plan(self._documents, q_THD, scale)
        out_THD, _, _ = core.forward(q_THD.contiguous(), *self._kv, plan)
        return out_THD.flatten(1)


def _plan(documents: Documents, q_THD: Tensor, scale: float | None) -> Plan:
    return Plan(documents, 1 / math.sqrt(q_THD.shape[-1]) if scale is None else scale)


class TrainingAttention:
    """contract.attention.Attention for the S forwards of training-time test of a one-layer draft:
    each `write` begins the next step."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._steps: list[tuple[Tensor, Tensor]] = []

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Keys and values of one step."""
        assert layer == 0, "an EAGLE-3 draft has one layer"
        self._steps.append((k_TKD.contiguous(), v_TKD.contiguous()))

    def attend(self, layer: int, q_THD: Tensor, *, scale: float | None = None) -> Tensor:
        """Over step 0 causally and over each row's own keys of the later steps; [T, H * D]."""
        causal, *diagonals = self._steps
        core = choose_core(q_THD, *causal)
        plan = _plan(self._documents, q_THD, scale)
        return joint_attention(core, plan, q_THD.contiguous(), causal, diagonals).flatten(1)


def choose_core(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> CausalCore:
    """The fastest core that agrees with `Plain` on this device for these heads (tried once)."""
    num_heads, head_dim = q_THD.shape[1:]
    if v_TKD.shape[-1] != head_dim:
        return Plain()
    return _probe(q_THD.device, q_THD.dtype, num_heads, k_TKD.shape[1], head_dim)


@functools.cache
def _probe(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> CausalCore:
    core: CausalCore = VarlenFlash() if device.type == "cuda" else CpuFlash()
    reason = "it does not agree with plain attention"
    try:
        if _agrees(core, device, dtype, num_heads, num_kv_heads, head_dim):
            return core
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
    if dtype in (torch.bfloat16, torch.float16) or device.type == "cpu":
        name = type(core).__name__
        _LOG.warning("training runs with plain attention, %s cannot be used: %s", name, reason)
    return Plain()


def _agrees(
    core: CausalCore,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> bool:
    """Whether outputs and gradients of a small packed batch with a diagonal are Plain's."""
    plan = Plan(Documents.of((5, 1, 130), device), 1 / math.sqrt(head_dim))
    generator = torch.Generator().manual_seed(0)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_kv_heads, num_kv_heads, num_heads)
    *inputs, grad = (
        torch.randn(136, count, head_dim, generator=generator).to(device, dtype) for count in heads
    )
    results: list[list[Tensor]] = []
    for one in (core, Plain()):
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            causal, diagonal = (leaves[1], leaves[2]), (leaves[3], leaves[4])
            out = joint_attention(one, plan, leaves[0], causal, [diagonal])
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    # By norm: single elements of 16-bit results differ by more than they say.
    tolerance = 0.03 if dtype.itemsize == 2 else 1e-4
    return all(
        bool((a.double() - b.double()).norm() <= tolerance * b.double().norm())
        for a, b in zip(*results, strict=True)
    )
