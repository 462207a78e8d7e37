"""Distillation loss over the draft's vocabulary, with its gradients, a few rows at a time.

For row u of the target and step k the draft predicts token u + 1 from the base row u - 1 - k:

    loss = sum_k decay^k / N_k * sum_u m_ku * -sum_v P_u(v) log softmax(head z_k[u - 1 - k])_v

P is the target's softmax over the draft's vocabulary alone, N_k the number of aligned rows of the
step in the whole optimizer step (known on the host before anything runs). Li et al., "EAGLE-3"
(2025), section 3; the normalisation by the mask makes the learning rate independent of the share
of answers.

Logits are S x rows x vocabulary: they would be most of the memory. So rows go through in chunks,
and as the loss is a scalar whose gradient is known at once, each chunk's logits become the
gradients of hidden states and head immediately (nothing is stored, nothing is computed twice).
The target's logits of a chunk serve all steps; over the full vocabulary they exist in the target's
own dtype only.

Shape suffixes: S steps, T rows, U rows in the loss, C rows of a chunk, H draft hidden, V draft
vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.contract.target import Target
from eyas.train.packing import LossRows

# Bytes that the logits of one chunk may take, by kind of device.
CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**26}


@dataclasses.dataclass(frozen=True)
class Teacher:
    """What the draft learns from.

    hidden_TH: the target's final-normed states of the batch. kept_V: int64, target ids of the
    draft's vocabulary. require_kept_argmax: leave out rows whose most probable token the draft
    cannot propose; whatever it learned there, a greedy chain would end at that row.
    """

    target: Target
    hidden_TH: Tensor
    kept_V: Tensor
    require_kept_argmax: bool = True


@dataclasses.dataclass(frozen=True)
class LossOutput:
    """loss_S: fp32 cross-entropies, each step's sum over its N_k (not decayed). correct_S: fp32
    number of aligned rows at which the draft's most probable token is the target's, out of the
    whole vocabulary. grad_z: gradient of the total loss by step [T, H]; grad_head_VH: fp32."""

    loss_S: Tensor
    correct_S: Tensor
    grad_z: list[Tensor]
    grad_head_VH: Tensor


@torch.no_grad()
def distillation_loss(
    z: Sequence[Tensor],
    head_VH: Tensor,
    teacher: Teacher,
    rows: LossRows,
    *,
    normalizer_S: Sequence[int],
    decay: float,
) -> LossOutput:
    """Loss and gradients of one batch.

    z: final-normed draft states [T, H] of each step. head_VH: the draft's head, of the same dtype.
    normalizer_S: N_k; a step without aligned rows counts nothing.
    """
    num_steps, num_rows = len(z), len(z[0])
    wide = torch.float64 if head_VH.dtype == torch.float64 else torch.float32
    flat_z = torch.stack(list(z)).flatten(0, 1)
    grad_flat = torch.zeros_like(flat_z)
    grad_head = torch.zeros_like(head_VH, dtype=wide)
    loss_S = head_VH.new_zeros(num_steps, dtype=wide)
    correct_S = torch.zeros_like(loss_S)
    share_S1 = _shares(normalizer_S, loss_S)[:, None]
    decay_S1 = decay ** torch.arange(num_steps, device=loss_S.device, dtype=wide)[:, None]
    first_S1 = (torch.arange(num_steps, device=rows.row_U.device) * num_rows)[:, None]
    back_S1 = torch.arange(1, num_steps + 1, device=rows.row_U.device)[:, None]
    is_kept = _membership(teacher)
    size = chunk_rows(teacher.target.vocab_size, head_VH, num_steps)
    for start in range(0, len(rows.row_U), size):
        row_C, valid_SC = rows.row_U[start : start + size], rows.valid_SU[:, start : start + size]
        logits = teacher.target.compute_logits(teacher.hidden_TH[row_C])
        best_C = logits.argmax(-1)
        p_CV = F.softmax(logits.index_select(1, teacher.kept_V), dim=-1, dtype=wide)
        del logits
        weight_SC = valid_SC & is_kept[best_C] if teacher.require_kept_argmax else valid_SC
        # Base rows of entries that are not valid may lie before the batch; they weigh nothing.
        index = ((row_C - back_S1).clamp_(min=0) + first_S1).view(-1)
        z_NH = flat_z.index_select(0, index)
        logits_SCV = (z_NH @ head_VH.mT).view(num_steps, len(row_C), -1)
        hit_SC = teacher.kept_V[logits_SCV.argmax(-1)] == best_C
        correct_S += (hit_SC & valid_SC).sum(1)
        log_q_SCV = F.log_softmax(logits_SCV, dim=-1, dtype=wide)
        entropy_SC = (log_q_SCV * p_CV).sum(-1).neg_()
        loss_S += torch.where(weight_SC, entropy_SC, 0.0).sum(1)
        delta_NV = log_q_SCV.exp_().sub_(p_CV).to(head_VH.dtype).flatten(0, 1)
        scale_N1 = (weight_SC * (share_S1 * decay_S1)).view(-1, 1)
        grad_flat.index_add_(0, index, (delta_NV @ head_VH) * scale_N1.to(z_NH.dtype))
        grad_head += delta_NV.mT @ (z_NH * scale_N1).to(z_NH.dtype)
    grad_z = list(grad_flat.view(num_steps, num_rows, -1))
    return LossOutput(loss_S * share_S1[:, 0], correct_S, grad_z, grad_head)


def _shares(normalizer_S: Sequence[int], like_S: Tensor) -> Tensor:
    """1 / N_k, 0 for a step without rows; no synchronisation."""
    shares = torch.tensor([1 / n if n else 0.0 for n in normalizer_S], dtype=like_S.dtype)
    if like_S.is_cuda:
        shares = shares.pin_memory()
    return shares.to(like_S.device, non_blocking=True)


def _membership(teacher: Teacher) -> Tensor:
    """bool over the target's vocabulary: whether the draft can propose it."""
    size = teacher.target.vocab_size
    is_kept = torch.zeros(size, dtype=torch.bool, device=teacher.kept_V.device)
    return is_kept.index_fill_(0, teacher.kept_V, True)


def chunk_rows(target_vocab_size: int, head_VH: Tensor, num_steps: int) -> int:
    """Rows of a chunk, so that all its logits together stay within CHUNK_BYTES."""
    item, wide = head_VH.element_size(), max(4, head_VH.element_size())
    target_bytes = target_vocab_size * item
    # Logits, log-probabilities, one product of them, and the gradient in the head's dtype.
    draft_bytes = len(head_VH) * (wide + num_steps * (2 * item + 2 * wide))
    budget = CHUNK_BYTES.get(head_VH.device.type, CHUNK_BYTES["cpu"])
    return max(1, budget // (target_bytes + draft_bytes))
