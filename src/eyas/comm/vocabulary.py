"""A vocabulary that ranks share: whose ids are where, and what they tell each other of them (D12).

Shape suffixes: T rows, V vocabulary, C columns.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor
from torch.nn import functional as F

from eyas.comm.group import Group


@dataclasses.dataclass(frozen=True)
class VocabularyPart:
    """Ids first .. first + size - 1 of `full`: those of this rank. The ranks' parts follow one
    another and are equally large, but for the last ones'. Implements contract.target.Vocabulary."""

    first: int
    size: int
    full: int
    group: Group

    @property
    def widest(self) -> int:
        """Ids of the first rank; no rank has more."""
        return -(-self.full // self.group.size)

    def gather(self, logits_TV: Tensor) -> Tensor:
        """Each rank's logits -> those of the whole vocabulary, the same bytes on every rank."""
        padded = F.pad(logits_TV, (0, self.widest - self.size), value=float("-inf"))
        return self.group.all_gather(padded)[..., : self.full]

    def join(self, x_TC: Tensor) -> Tensor:
        """The ranks' tensors of one shape side by side, the same bytes on every rank."""
        return self.group.all_gather(x_TC)
