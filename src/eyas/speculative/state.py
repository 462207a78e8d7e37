"""What the device knows of the running requests, by slot (design D6).

Shape suffixes: S slots, P pages a request, H draft hidden, K first-level candidates,
M stop ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.cache.pool import NULL_PAGE

MAX_STOP_IDS = 32


@dataclasses.dataclass(frozen=True)
class SlotSettings:
    """What a request brings to its slot. remaining: new tokens that it may still emit (>= 1);
    temperature 0 is greedy; seed: int64; stop_ids: at most MAX_STOP_IDS."""

    remaining: int
    temperature: float
    seed: int
    stop_ids: Sequence[int]


class SlotState:
    """Device tensors of fixed size; the last slot is trash, for padding.

    length_S: tokens whose target keys and values are committed. pending_S: the token after them,
    emitted but not yet in the target's cache; the draft's entry for it is at index length.
    remaining_S: tokens that may still be emitted. active_S: the round changes nothing else.
    draft_input_SH: s = fc(features) of the last committed token. draft_hidden_SH,
    candidate_token_SK, candidate_score_SK: the draft's state after the extend, valid only if the
    last extend of the slot was a full one.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_pages: int,
        draft_hidden_size: int,
        draft_dtype: torch.dtype,
        topk: int,
        device: torch.device | str,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.trash_slot = num_slots - 1
        self.device = torch.device(device)
        self.length_S = zeros(num_slots)
        self.pending_S = zeros(num_slots)
        self.remaining_S = zeros(num_slots)
        self.active_S = zeros(num_slots, dtype=torch.bool)
        self.page_table_SP = zeros(num_slots, max_pages).fill_(NULL_PAGE)
        self.temperature_S = zeros(num_slots, dtype=torch.float32)
        self.seed_S = zeros(num_slots)
        self.stop_ids_SM = zeros(num_slots, MAX_STOP_IDS).fill_(-1)
        self.draft_input_SH = zeros(num_slots, draft_hidden_size, dtype=draft_dtype)
        self.draft_hidden_SH = zeros(num_slots, draft_hidden_size, dtype=draft_dtype)
        self.candidate_token_SK = zeros(num_slots, topk)
        self.candidate_score_SK = zeros(num_slots, topk, dtype=torch.float32)

    def admit(self, slot: int, settings: SlotSettings) -> None:
        """Prepare a slot for a request; it becomes active with its prefill's last chunk."""
        self.active_S[slot] = False
        self.length_S[slot] = 0
        self.remaining_S[slot] = settings.remaining
        self.temperature_S[slot] = settings.temperature
        self.seed_S[slot] = settings.seed
        row = list(settings.stop_ids) + [-1] * (MAX_STOP_IDS - len(settings.stop_ids))
        self.stop_ids_SM[slot] = torch.tensor(row)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Write a slot's page table; entries past `pages` become the null page."""
        row = list(pages) + [NULL_PAGE] * (self.page_table_SP.shape[1] - len(pages))
        self.page_table_SP[slot] = torch.tensor(row)

    def release(self, slot: int) -> None:
        """Make the slot a no-op from the next round on."""
        self.active_S[slot] = False
