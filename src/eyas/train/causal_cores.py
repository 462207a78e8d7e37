"""Causal attention by document, forward and backward, with the log-sum-exp in the open.

Shape suffixes: T rows, H query heads, K key/value heads, D head size, E documents + 1.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor


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


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed for a forward. scale: of the scores before the softmax."""

    documents: Documents
    scale: float


class CausalCore(Protocol):
    """Causal attention by document, forward and backward, with the log-sum-exp in the open.

    lse_HT is fp32 (fp64 for fp64 inputs). `extra` is what the core's own backward needs besides.
    """

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """(out [T, H, D], lse [H, T], extra)."""

    def backward(
        self,
        grad_THD: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        result: tuple[Tensor, Tensor, tuple[Tensor, ...]],
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of (q, k, v). `result` may hold an output and a log-sum-exp over more keys
        than these: see `train.attention`."""


class VarlenFlash:
    """CUDA: the flash kernels with document borders, 16-bit inputs, all documents in one launch."""

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See CausalCore."""
        starts, longest = plan.documents.starts_E, max(plan.documents.lengths)
        out, lse_HT, state, unused, _ = torch.ops.aten._flash_attention_forward(
            *(q_THD, k_TKD, v_TKD, starts, starts, longest, longest, 0.0, True, False),
            scale=plan.scale,
        )
        if lse_HT.shape != (q_THD.shape[1], len(q_THD)):
            raise RuntimeError(f"log-sum-exp of shape {tuple(lse_HT.shape)}")
        return out, lse_HT, (state, unused)

    def backward(
        self,
        grad_THD: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        result: tuple[Tensor, Tensor, tuple[Tensor, ...]],
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See CausalCore."""
        out, lse_HT, extra = result
        starts, longest = plan.documents.starts_E, max(plan.documents.lengths)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *(grad_THD, *inputs, out, lse_HT, starts, starts, longest, longest, 0.0, True, *extra),
            scale=plan.scale,
        )
        return grads


class _ByDocument:
    """One document at a time, heads first, keys and values repeated for each query head."""

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See CausalCore."""
        num_groups = q_THD.shape[1] // k_TKD.shape[1]
        outs, sums = [], []
        for start, end in plan.documents.spans():
            q = _heads_first(q_THD[start:end])
            k, v = (_heads_first(x[start:end], num_groups) for x in (k_TKD, v_TKD))
            out, lse = self._attend(q, k, v, plan.scale)
            outs.append(out[0].transpose(0, 1))
            sums.append(lse[0])
        return torch.cat(outs), torch.cat(sums, dim=-1), ()

    def backward(
        self,
        grad_THD: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        result: tuple[Tensor, Tensor, tuple[Tensor, ...]],
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See CausalCore."""
        q_THD, k_TKD, v_TKD = inputs
        out_THD, lse_HT, _ = result
        num_groups = q_THD.shape[1] // k_TKD.shape[1]
        grads: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for start, end in plan.documents.spans():
            grad, q, out = (_heads_first(x[start:end]) for x in (grad_THD, q_THD, out_THD))
            k, v = (_heads_first(x[start:end], num_groups) for x in (k_TKD, v_TKD))
            lse = lse_HT[None, :, start:end].contiguous()
            dq, dk, dv = self._differentiate(grad, q, k, v, (out, lse), plan.scale)
            grads[0].append(dq[0].transpose(0, 1))
            for part, into in ((dk, grads[1]), (dv, grads[2])):
                summed = part[0].view(k_TKD.shape[1], num_groups, end - start, -1).sum(1)
                into.append(summed.transpose(0, 1))
        return torch.cat(grads[0]), torch.cat(grads[1]), torch.cat(grads[2])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _differentiate(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


def _heads_first(x_TKD: Tensor, num_groups: int = 1) -> Tensor:
    x_1KTD = x_TKD.transpose(0, 1)[None]
    return x_1KTD.repeat_interleave(num_groups, dim=1).contiguous()


class CpuFlash(_ByDocument):
    """CPU: torch's own flash kernel, any float dtype; memory is linear in the length."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True, scale=scale
        )
        return result

    def _differentiate(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads: tuple[Tensor, Tensor, Tensor] = backward(
            *(grad, q, k, v, *result, 0.0, True), scale=scale
        )
        return grads


class Plain(_ByDocument):
    """Any device and dtype, by the formulas, with the whole score matrix of a document: the
    yardstick of the others, and what runs where neither works."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, scale)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ v.to(scores.dtype)).to(q.dtype), lse

    def _differentiate(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = result
        p = (self._scores(q, k, scale) - lse[..., None]).exp()
        wide = p.dtype
        dv = p.mT @ grad.to(wide)
        delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        ds = p * (grad.to(wide) @ v.to(wide).mT - delta) * scale
        dq, dk = ds @ k.to(wide), ds.mT @ q.to(wide)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    def _scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        wide = wide_dtype(q)
        scores = q.to(wide) @ k.to(wide).mT * scale
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1)
        return scores.masked_fill_(future, float("-inf"))


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums are made in: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
