"""What the speculative round needs of a draft model (D1, D7).

Shape suffixes: T rows, F captured features, H draft hidden, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from eyas.contract.attention import Attention, KVLayout
from eyas.contract.target import LocalLogits, Vocabulary


@dataclasses.dataclass(frozen=True)
class DraftOutput:
    """logits_TV over the draft vocabulary; hidden_TH is what the next step feeds back. part: of
    which draft ids the logits are, where several ranks share them; None: of all."""

    logits_TV: Tensor
    hidden_TH: Tensor
    part: Vocabulary | None = None

    @property
    def logits(self) -> LocalLogits:
        """The logits with their part."""
        return LocalLogits(self.logits_TV, self.part)


class Draft(Protocol):
    """The interface of a draft model.

    The pair at position t is (token t+1, hidden of position t); its key and value are stored at
    index t+1, its rotary position is t (D7).
    """

    @property
    def hidden_size(self) -> int:
        """Width of the draft's own hidden state."""

    @property
    def draft_vocab_size(self) -> int:
        """Rows of the draft's head."""

    @property
    def kv_layout(self) -> KVLayout:
        """Layout of the draft's keys and values."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Target boundaries whose residual streams the draft reads, lowest first."""

    @property
    def target_ids_V(self) -> Tensor:
        """int64 [V]: the target's token id of each draft id (arange + d2t)."""

    def bind(self, slot: int, prompt_token_ids: Sequence[int]) -> None:
        """A request with this prompt enters a slot (for drafts that keep state by slot)."""

    def combine(self, features_TF: Tensor) -> Tensor:
        """s = fc(features) [T, H], the draft's input for rows that come from the target."""

    def write_kv(
        self, tokens_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attention: Attention
    ) -> None:
        """Store only keys and values of the pairs (rows that are not the last need no more)."""

    def forward(
        self,
        tokens_T: Tensor,
        hidden_TH: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        attention: Attention,
    ) -> DraftOutput:
        """One draft step; stores its keys and values too.

        slots_T (int64) says which request each row belongs to, for drafts that keep state by slot.
        """
