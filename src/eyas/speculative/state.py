"""What the device knows of the running requests, by slot (design D6).

Shape suffixes: S slots, P pages a request, H draft hidden, K first-level candidates, M stop ids,
A logit bias entries, V target vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eyas import kernels
from eyas.cache.pool import NULL_PAGE
from eyas.kernels import SamplingMode
from eyas.types import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams

NO_DRAFT_LIMIT = 2**31
# Far below where fp32 logits drown the noise; smaller ones would overflow the quotient (design D9).
MIN_TEMPERATURE = 1e-30


@dataclasses.dataclass(frozen=True)
class SlotSettings:
    """What a request brings to its slot.

    remaining: new tokens that it may still emit (>= 1). seed: int64. stop_ids: all tokens that
    end it, at most MAX_STOP_IDS. output_token_ids: generated before a preemption.
    """

    params: SamplingParams
    remaining: int
    seed: int
    stop_ids: Sequence[int]
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()


def sampling_mode(params: SamplingParams) -> SamplingMode:
    """The processors that one request needs; those of a batch are joined with |."""
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
    return SamplingMode(
        noise=params.temperature > 0,
        truncate=params.temperature > 0
        and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
        penalize=any(penalties),
        bias=bool(params.logit_bias) or params.min_tokens > 0,
        num_logprobs=params.logprobs,
    )


class SlotState:
    """Device tensors of fixed size; the last slot is trash, for padding.

    length_S: tokens whose target keys and values are committed. pending_S: the token after them,
    emitted but not yet in the target's cache; the draft's entry for it is at index length.
    remaining_S: tokens that may still be emitted; emitted_S: tokens generated so far. active_S:
    False makes the slot a no-op. max_draft_S: drafted tokens accepted a round at most.
    draft_input_SH: s = fc(features) of the last committed token. draft_hidden_SH,
    candidate_token_SK, candidate_score_SK: the draft's state after `prime`.
    output_count_SV, prompt_seen_SV: for penalties, kept for slots whose request has any.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_pages: int,
        vocab_size: int,
        draft_hidden_size: int,
        draft_dtype: torch.dtype,
        topk: int,
        device: torch.device | str,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def numbers(default: float = 0.0) -> Tensor:
            return zeros(num_slots, dtype=torch.float32).fill_(default)

        self.trash_slot = num_slots - 1
        self.device = torch.device(device)
        self.length_S = zeros(num_slots)
        self.pending_S = zeros(num_slots)
        self.remaining_S = zeros(num_slots)
        self.emitted_S = zeros(num_slots)
        self.active_S = zeros(num_slots, dtype=torch.bool)
        self.page_table_SP = zeros(num_slots, max_pages).fill_(NULL_PAGE)
        self.stop_ids_SM = zeros(num_slots, MAX_STOP_IDS).fill_(-1)
        self.seed_S = zeros(num_slots)
        self.max_draft_S = zeros(num_slots)
        self.min_tokens_S = zeros(num_slots)
        self.temperature_S = numbers()
        self.top_k_S = zeros(num_slots)
        self.top_p_S = numbers(1.0)
        self.min_p_S = numbers()
        self.presence_S = numbers()
        self.frequency_S = numbers()
        self.repetition_S = numbers(1.0)
        self.bias_id_SA = zeros(num_slots, MAX_LOGIT_BIAS)
        self.bias_value_SA = zeros(num_slots, MAX_LOGIT_BIAS, dtype=torch.float32)
        self.output_count_SV = zeros(num_slots, vocab_size, dtype=torch.int32)
        self.prompt_seen_SV = zeros(num_slots, vocab_size, dtype=torch.bool)
        self.draft_input_SH = zeros(num_slots, draft_hidden_size, dtype=draft_dtype)
        self.draft_hidden_SH = zeros(num_slots, draft_hidden_size, dtype=draft_dtype)
        self.candidate_token_SK = zeros(num_slots, topk)
        self.candidate_score_SK = zeros(num_slots, topk, dtype=torch.float32)

    def admit(self, slot: int, settings: SlotSettings) -> None:
        """Prepare a slot for a request; it becomes active with its prefill's last chunk."""
        params = settings.params
        is_greedy = params.temperature < MIN_TEMPERATURE
        numbers = {
            "length_S": 0,
            "remaining_S": settings.remaining,
            "emitted_S": len(settings.output_token_ids),
            "seed_S": settings.seed,
            "max_draft_S": NO_DRAFT_LIMIT if params.speculation else 0,
            "top_k_S": params.top_k,
            "min_tokens_S": params.min_tokens,
            "active_S": False,
        }
        floats = {
            "temperature_S": 0.0 if is_greedy else params.temperature,
            "top_p_S": params.top_p,
            "min_p_S": params.min_p,
            "presence_S": params.presence_penalty,
            "frequency_S": params.frequency_penalty,
            "repetition_S": params.repetition_penalty,
        }
        rows = {
            "stop_ids_SM": self._padded(self.stop_ids_SM, settings.stop_ids, -1),
            "bias_id_SA": self._padded(self.bias_id_SA, list(params.logit_bias), 0),
            "bias_value_SA": self._padded(self.bias_value_SA, list(params.logit_bias.values()), 0),
        }
        if kernels.has_triton(self.device):
            self._write_packed(slot, numbers, floats, rows)
        else:
            for name, value in (numbers | floats).items():
                getattr(self, name)[slot] = value
            for name, row in rows.items():
                getattr(self, name)[slot] = row
        if sampling_mode(params).penalize:
            self._count(slot, settings)

    def _write_packed(
        self,
        slot: int,
        numbers: Mapping[str, int],
        floats: Mapping[str, float],
        rows: Mapping[str, Tensor],
    ) -> None:
        """As admit's assignments, in one copy to the device and one launch: each assignment is a
        launch of its own, and a row waits for the device."""
        from eyas.kernels import triton_slots

        words = [
            torch.tensor([slot, *numbers.values()]),
            triton_slots.float_words(list(floats.values())),
        ]
        for row in rows.values():
            words.append(triton_slots.float_words(row) if row.is_floating_point() else row)
        triton_slots.write_slot(
            self.to_device(torch.cat(words)),
            numbers=[_bytes(getattr(self, name)) for name in numbers],
            floats=[getattr(self, name) for name in floats],
            rows=[getattr(self, name) for name in rows],
        )

    def set_pages(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Write the page tables of slots, in one copy; entries past a slot's pages become the
        null page."""
        rows = torch.stack([self._padded(self.page_table_SP, p, NULL_PAGE) for p in pages.values()])
        slots = self.to_device(torch.tensor(list(pages)))
        self.page_table_SP.index_copy_(0, slots, self.to_device(rows))

    def pages(self, slots: Tensor, index: Tensor, page_size: int) -> Tensor:
        """Page that holds a cache index of a slot (int64, of any one shape)."""
        return self.page_table_SP[slots, index // page_size]

    def rows(self, slots: Tensor, index: Tensor, page_size: int) -> Tensor:
        """Pool row of a cache index of a slot (int64, of any one shape)."""
        return self.pages(slots, index, page_size) * page_size + index % page_size

    def release(self, slot: int) -> None:
        """Make the slot a no-op from the next round on."""
        self.active_S[slot] = False

    def _padded(self, table: Tensor, values: Sequence[float], padding: float) -> Tensor:
        """A row of a table, on the host."""
        row = list(values) + [padding] * (table.shape[1] - len(values))
        return torch.tensor(row, dtype=table.dtype)

    def to_device(self, host: Tensor) -> Tensor:
        """A copy which the host does not wait for."""
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def _count(self, slot: int, settings: SlotSettings) -> None:
        """Start the penalty counts from the tokens that are there already."""
        for table in (self.output_count_SV, self.prompt_seen_SV):
            table[slot] = 0
        prompt = self.to_device(torch.tensor(settings.prompt_token_ids))
        self.prompt_seen_SV[slot, prompt] = True
        if settings.output_token_ids:
            output = self.to_device(torch.tensor(settings.output_token_ids))
            one = torch.ones_like(output, dtype=torch.int32)
            self.output_count_SV[slot].index_add_(0, output, one)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int8) if tensor.dtype is torch.bool else tensor
