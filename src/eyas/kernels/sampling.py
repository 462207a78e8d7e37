"""Sampling processors as torch operations: exact, static in shape, without sorting a vocabulary.

Order: penalties, logit bias, suppressed tokens, temperature, top-k, top-p, min-p. Ties at the
border of top-k and top-p are kept, so that the result does not depend on an order of ids.

Shape suffixes: R rows, V vocabulary, M bias entries, C stop ids.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class SamplingMode:
    """Which processors a batch needs; what no request asks for costs nothing.

    noise: some request samples. truncate: top-k, top-p or min-p. penalize: penalties. bias:
    logit_bias or min_tokens. num_logprobs: top log-probabilities reported a token, None for none
    at all (0 reports the emitted token's alone).
    """

    noise: bool = False
    truncate: bool = False
    penalize: bool = False
    bias: bool = False
    num_logprobs: int | None = None

    def __or__(self, other: SamplingMode) -> SamplingMode:
        counts = [n for n in (self.num_logprobs, other.num_logprobs) if n is not None]
        return SamplingMode(
            noise=self.noise or other.noise,
            truncate=self.truncate or other.truncate,
            penalize=self.penalize or other.penalize,
            bias=self.bias or other.bias,
            num_logprobs=max(counts, default=None),
        )


def apply_penalties(
    logits_RV: Tensor,
    *,
    count_RV: Tensor,
    prompt_RV: Tensor,
    presence_R: Tensor,
    frequency_R: Tensor,
    repetition_R: Tensor,
) -> Tensor:
    """Presence and frequency penalties by the tokens generated so far (OpenAI's definition) and
    repetition penalty by prompt and generated tokens (Keskar et al., CTRL, 2019); fp32.

    count_RV: how often each token was generated before the row's choice. prompt_RV: bool.
    """
    logits_RV = logits_RV.float()
    repetition_R1 = repetition_R[:, None]
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where(prompt_RV | (count_RV > 0), repeated_RV, logits_RV)
    logits_RV = logits_RV - frequency_R[:, None] * count_RV
    return logits_RV - presence_R[:, None] * (count_RV > 0)


def largest_threshold(value_RV: Tensor, weight_RV: Tensor, want_R: Tensor) -> Tensor:
    """The largest t [R] such that the weights of values >= t sum to at least `want`; -inf if none.

    A bisection over the bit patterns of fp32, whose order is that of the numbers: exact in 32
    steps whatever the values are (NaN excluded), and one pass over the row a step.
    """
    reached_RV = torch.empty_like(value_RV, dtype=torch.bool)
    part_RV = torch.empty_like(weight_RV)  # written anew each step: fresh pages cost more than work
    first = torch.full_like(want_R, -(2**31), dtype=torch.int64)
    low_R, high_R = first, torch.full_like(first, 2**31 - 1)
    for _ in range(32):
        middle_R = (low_R + high_R + 1) >> 1
        torch.ge(value_RV, _from_order(middle_R)[:, None], out=reached_RV)
        enough_R = torch.mul(weight_RV, reached_RV, out=part_RV).sum(-1) >= want_R
        low_R = torch.where(enough_R, middle_R, low_R)
        high_R = torch.where(enough_R, high_R, middle_R - 1)
    found_R = _from_order(low_R)
    return torch.where(found_R.isnan(), float("-inf"), found_R)


def _from_order(order_R: Tensor) -> Tensor:
    """The fp32 whose rank among all bit patterns is `order` (int64, in int32's range)."""
    bits = torch.where(order_R >= 0, order_R, order_R ^ 0x7FFFFFFF)
    return bits.to(torch.int32).view(torch.float32)


def truncate(scores_RV: Tensor, *, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """-inf outside the top k, then outside the smallest set of mass top_p among those, then under
    min_p times the best probability. top_k 0, top_p 1 and min_p 0 switch each off; fp32."""
    off = float("-inf")
    ones_RV = torch.ones_like(scores_RV)
    kth_R = largest_threshold(scores_RV, ones_RV, top_k_R.float())
    kth_R = torch.where(top_k_R > 0, kth_R, off)
    scores_RV = scores_RV.masked_fill(scores_RV < kth_R[:, None], off)
    probability_RV = scores_RV.softmax(-1)
    least = torch.finfo(torch.float32).tiny  # a top_p of 0 in fp32 keeps the best token as well
    border_R = largest_threshold(scores_RV, probability_RV, top_p_R.clamp(min=least))
    border_R = torch.where(top_p_R < 1, border_R, off)
    floor_R = min_p_R * probability_RV.amax(-1)
    dropped_RV = (scores_RV < border_R[:, None]) | (probability_RV < floor_R[:, None])
    return scores_RV.masked_fill(dropped_RV, off)


def token_logprobs(logits_RV: Tensor, chosen_R: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities under the model's own distribution, before any processor.

    Returns (ids [R, 1 + num_top] int64, values [R, 1 + num_top] fp32): the chosen token first,
    then the most probable ones; as many as there are where the vocabulary is smaller.
    """
    logprob_RV = logits_RV.float().log_softmax(-1)
    chosen_R1 = chosen_R[:, None]
    value_RT, id_RT = logprob_RV.topk(min(num_top, logits_RV.shape[1]), dim=-1)
    return (
        torch.cat((chosen_R1, id_RT), dim=1),
        torch.cat((logprob_RV.gather(1, chosen_R1), value_RT), dim=1),
    )
