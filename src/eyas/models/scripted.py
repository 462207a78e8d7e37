"""A draft that proposes given tokens: the fixture behind every exact acceptance figure.

Shape suffixes: T rows, F captured features, V vocabulary, S slots, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.contract.attention import Attention, KVLayout
from eyas.contract.draft import DraftOutput

FAVOURITE_LOGIT = 1e4  # above any Gumbel noise, which stays under 23


class ScriptedDraft:
    """Implements contract.draft.Draft from whole token sequences (prompt and continuation).

    A request is matched to the first sequence that its prompt begins; where there is none, or
    past a sequence's end, token 0 is proposed. Runner-up candidates are the ids after the
    scripted one, so that trees have distinct children.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._sequences = [tuple(sequence) for sequence in sequences]
        longest = max((len(s) for s in self._sequences), default=0)
        self._script_SP = torch.zeros(num_slots, longest + 1, dtype=torch.int64, device=device)
        self._ids_V = torch.arange(vocab_size, device=device)

    @property
    def hidden_size(self) -> int:
        """A single number, always 0."""
        return 1

    @property
    def draft_vocab_size(self) -> int:
        """The whole vocabulary."""
        return len(self._ids_V)

    @property
    def kv_layout(self) -> KVLayout:
        """One number a token."""
        return KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, v_head_dim=1)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Reads the embeddings only, so that a target's capture path runs."""
        return (0,)

    @property
    def target_ids_V(self) -> Tensor:
        """The identity."""
        return self._ids_V

    def bind(self, slot: int, prompt_token_ids: Sequence[int]) -> None:
        """Find the sequence that the prompt begins."""
        prompt = tuple(prompt_token_ids)
        self._script_SP[slot] = 0
        for sequence in self._sequences:
            if sequence[: len(prompt)] == prompt:
                self._script_SP[slot, : len(sequence)] = torch.tensor(sequence)
                return

    def combine(self, features_TF: Tensor) -> Tensor:
        """Zeros [T, 1]."""
        return features_TF.new_zeros(len(features_TF), 1)

    def write_kv(
        self, tokens_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attention: Attention
    ) -> None:
        """Store the token as key and the position as value, so that tests can read them back."""
        dtype = hidden_TH.dtype
        attention.write(0, tokens_T.to(dtype).view(-1, 1, 1), positions_T.to(dtype).view(-1, 1, 1))

    def forward(
        self,
        tokens_T: Tensor,
        hidden_TH: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        attention: Attention,
    ) -> DraftOutput:
        """The pair at position t predicts the token at t + 2."""
        self.write_kv(tokens_T, hidden_TH, positions_T, attention)
        last = self._script_SP.shape[1] - 1
        favourite_T = self._script_SP[slots_T, (positions_T + 2).clamp(max=last)]
        distance_TV = (self._ids_V - favourite_T[:, None]) % len(self._ids_V)
        return DraftOutput(FAVOURITE_LOGIT / (1.0 + distance_TV.float()), hidden_TH)
