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

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Where documents lie in a packed batch. lengths: rows of each, all above 0; starts_E: int32
    [documents + 1] on the device, the running sum from 0."""

    lengths: tuple[int, ...]
    starts_E: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> Documents:
        """Documents of these lengths, one after another."""
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        if torch.device(device).type == "cuda":
            starts = starts.pin_memory()
        return cls(tuple(lengths), starts.to(device, non_blocking=True))

    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each document."""
        return itertools.pairwise((0, *itertools.accumulate(self.lengths)))


class CausalCore(Protocol):
    """Causal attention by document, forward and backward, with the log-sum-exp in the open.

    lse_HT is fp32 (fp64 for fp64 inputs). `extra` is what the core's own backward needs besides.
    """

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """(out [T, H, D], lse [H, T], extra)."""

    def backward(
        self,
        grad_THD: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        result: tuple[Tensor, Tensor, tuple[Tensor, ...]],
        documents: Documents,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of (q, k, v). `result` may hold an output and a log-sum-exp over more keys
        than these, see the head of this file."""


class VarlenFlash:
    """CUDA: the flash kernels with document borders, 16-bit inputs, all documents in one launch."""

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See CausalCore."""
        starts, longest = documents.starts_E, max(documents.lengths)
        out, lse_HT, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_THD, k_TKD, v_TKD, starts, starts, longest, longest, 0.0, True, False
        )
        if lse_HT.shape != (q_THD.shape[1], len(q_THD)):
            raise RuntimeError(f"log-sum-exp of shape {tuple(lse_HT.shape)}")
        return out, lse_HT, (state, unused)

    def backward(
        self,
        grad_THD: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        result: tuple[Tensor, Tensor, tuple[Tensor, ...]],
        documents: Documents,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See CausalCore."""
        out, lse_HT, extra = result
        starts, longest = documents.starts_E, max(documents.lengths)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *(grad_THD, *inputs, out, lse_HT, starts, starts, longest, longest, 0.0, True, *extra)
        )
        return grads


class _ByDocument:
    """One document at a time, heads first, keys and values repeated for each query head."""

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See CausalCore."""
        num_groups = q_THD.shape[1] // k_TKD.shape[1]
        outs, sums = [], []
        for start, end in documents.spans():
            q = _heads_first(q_THD[start:end])
            k, v = (_heads_first(x[start:end], num_groups) for x in (k_TKD, v_TKD))
            out, lse = self._attend(q, k, v)
            outs.append(out[0].transpose(0, 1))
            sums.append(lse[0])
        return torch.cat(outs), torch.cat(sums, dim=-1), ()

    def backward(
        self,
        grad_THD: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        result: tuple[Tensor, Tensor, tuple[Tensor, ...]],
        documents: Documents,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See CausalCore."""
        q_THD, k_TKD, v_TKD = inputs
        out_THD, lse_HT, _ = result
        num_groups = q_THD.shape[1] // k_TKD.shape[1]
        grads: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for start, end in documents.spans():
            grad, q, out = (_heads_first(x[start:end]) for x in (grad_THD, q_THD, out_THD))
            k, v = (_heads_first(x[start:end], num_groups) for x in (k_TKD, v_TKD))
            lse = lse_HT[None, :, start:end].contiguous()
            dq, dk, dv = self._differentiate(grad, q, k, v, out, lse)
            grads[0].append(dq[0].transpose(0, 1))
            for part, into in ((dk, grads[1]), (dv, grads[2])):
                summed = part[0].view(k_TKD.shape[1], num_groups, end - start, -1).sum(1)
                into.append(summed.transpose(0, 1))
        return torch.cat(grads[0]), torch.cat(grads[1]), torch.cat(grads[2])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _differentiate(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


def _heads_first(x_TKD: Tensor, num_groups: int = 1) -> Tensor:
    x_1KTD = x_TKD.transpose(0, 1)[None]
    return x_1KTD.repeat_interleave(num_groups, dim=1).contiguous()


class CpuFlash(_ByDocument):
    """CPU: torch's own flash kernel, any float dtype; memory is linear in the length."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True
        )
        return result

    def _differentiate(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads: tuple[Tensor, Tensor, Tensor] = backward(grad, q, k, v, out, lse, 0.0, True)
        return grads


class Plain(_ByDocument):
    """Any device and dtype, by the formulas, with the whole score matrix of a document: the
    yardstick of the others, and what runs where neither works."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ v.to(scores.dtype)).to(q.dtype), lse

    def _differentiate(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        p = (self._scores(q, k) - lse[..., None]).exp()
        wide = p.dtype
        dv = p.mT @ grad.to(wide)
        delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        ds = p * (grad.to(wide) @ v.to(wide).mT - delta) / math.sqrt(q.shape[-1])
        dq, dk = ds @ k.to(wide), ds.mT @ q.to(wide)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        wide = _wide(q)
        scores = q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1])
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1)
        return scores.masked_fill_(future, float("-inf"))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _JointSoftmax(torch.autograd.Function):
    """Causal step-0 keys and diagonal keys under one softmax. diagonals: k, v, k, v, ..."""

    @staticmethod
    def forward(
        ctx: Any,
        core: CausalCore,
        documents: Documents,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *diagonals: Tensor,
    ) -> Tensor:
        out_THD, lse_HT, extra = core.forward(q_THD, k_TKD, v_TKD, documents)
        score_JTKG = q_THD.new_empty(0)
        if diagonals:
            out_THD, lse_HT, score_JTKG = _add_diagonals(q_THD, out_THD, lse_HT, diagonals)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, lse_HT, score_JTKG, *extra, *diagonals)
        ctx.core, ctx.documents, ctx.num_extra = core, documents, len(extra)
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_THD, k_TKD, v_TKD, out_THD, lse_HT, score_JTKG, *rest = ctx.saved_tensors
        extra, diagonals = tuple(rest[: ctx.num_extra]), rest[ctx.num_extra :]
        grad_THD = grad_THD.contiguous()
        dq, dk, dv = ctx.core.backward(
            grad_THD, (q_THD, k_TKD, v_TKD), (out_THD, lse_HT, extra), ctx.documents
        )
        if not diagonals:
            return None, None, dq, dk, dv
        extra_dq, grads = _differentiate_diagonals(
            grad_THD, q_THD, (out_THD, lse_HT, score_JTKG), diagonals
        )
        return None, None, dq + extra_dq, dk, dv, *grads


def _add_diagonals(
    q_THD: Tensor, out_THD: Tensor, lse_HT: Tensor, diagonals: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """(joint output, joint log-sum-exp, diagonal scores), computed wide."""
    num_rows, num_kv_heads, head_dim = diagonals[0].shape
    q_TKGD = q_THD.to(_wide(q_THD)).view(num_rows, num_kv_heads, -1, head_dim)
    scale = 1 / math.sqrt(head_dim)
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
) -> tuple[Tensor, list[Tensor]]:
    """(the diagonals' share of dq, then dk, dv of each)."""
    out_THD, lse_HT, score_JTKG = result
    num_rows, num_kv_heads, head_dim = diagonals[0].shape
    grouped = (num_rows, num_kv_heads, -1, head_dim)
    wide = _wide(q_THD)
    q_TKGD, grad_TKGD = q_THD.to(wide).view(grouped), grad_THD.to(wide).view(grouped)
    delta_TKG = (grad_TKGD * out_THD.view(grouped)).sum(-1)
    weight_JTKG = (score_JTKG - lse_HT.t().reshape(delta_TKG.shape)).exp_()
    dq_TKGD, grads = torch.zeros_like(q_TKGD), []
    keys, values = diagonals[::2], diagonals[1::2]
    for weight_TKG, k_TKD, v_TKD in zip(weight_JTKG, keys, values, strict=True):
        ds_TKG = (grad_TKGD * v_TKD[:, :, None]).sum(-1).sub_(delta_TKG).mul_(weight_TKG)
        ds_TKG1 = ds_TKG.div_(math.sqrt(head_dim))[..., None]
        dq_TKGD.addcmul_(ds_TKG1, k_TKD[:, :, None])
        grads.append((ds_TKG1 * q_TKGD).sum(2).to(k_TKD.dtype))
        grads.append((weight_TKG[..., None] * grad_TKGD).sum(2).to(v_TKD.dtype))
    return dq_TKGD.view(q_THD.shape).to(q_THD.dtype), grads


def joint_attention(
    core: CausalCore,
    documents: Documents,
    q_THD: Tensor,
    causal: tuple[Tensor, Tensor],
    diagonals: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """[T, H, D] of queries over causal (k, v) and each row's own diagonal (k, v) pairs, one
    softmax; differentiable in all of them."""
    flat = itertools.chain.from_iterable(diagonals)
    out: Tensor = _JointSoftmax.apply(core, documents, q_THD, *causal, *flat)  # type: ignore[no-untyped-call]
    return out


class CausalAttention:
    """contract.attention.Attention for one forward over packed documents; keeps one layer's keys
    only, and nothing for a backward."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._kv: tuple[Tensor, Tensor] | None = None

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Keep this layer's keys and values for the `attend` that follows."""
        self._kv = k_TKD.contiguous(), v_TKD.contiguous()

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        """Causal by document; [T, H * D]."""
        assert self._kv is not None, "attend comes after write"
        core = choose_core(q_THD, self._kv[0])
        out_THD, _, _ = core.forward(q_THD.contiguous(), *self._kv, self._documents)
        return out_THD.flatten(1)


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

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        """Over step 0 causally and over each row's own keys of the later steps; [T, H * D]."""
        causal, *diagonals = self._steps
        core = choose_core(q_THD, causal[0])
        q_THD = q_THD.contiguous()
        return joint_attention(core, self._documents, q_THD, causal, diagonals).flatten(1)


def choose_core(q_THD: Tensor, k_TKD: Tensor) -> CausalCore:
    """The fastest core that agrees with `Plain` on this device for these heads (tried once)."""
    num_heads, head_dim = q_THD.shape[1:]
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
    documents = Documents.of((5, 1, 130), device)
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
            out = joint_attention(one, documents, leaves[0], causal, [diagonal])
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    # By norm: single elements of 16-bit results differ by more than they say.
    tolerance = 0.03 if dtype.itemsize == 2 else 1e-4
    return all(
        bool((a.double() - b.double()).norm() <= tolerance * b.double().norm())
        for a, b in zip(*results, strict=True)
    )
