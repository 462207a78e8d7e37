"""Both models as the check has them: built without memory, and measured."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch

from eyas.contract.draft import Draft
from eyas.contract.target import Target, missing_members
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.findings import Findings
from eyas.models.sharding import WHOLE, Parallel
from eyas.models.weight_slots import WeightSlot, weight_slots
from eyas.types import EyasError


@dataclasses.dataclass
class Side:
    """One model as far as it could be read. weight_bytes: in the dtype that it will run in, of a
    rank; full_bytes: of all that is stored; parallel: how it was divided to measure that."""

    checkpoint: Checkpoint | None = None
    model: Any = None
    config: Any = None
    slots: dict[str, WeightSlot] = dataclasses.field(default_factory=dict)
    weight_bytes: int = 0
    full_bytes: int = 0
    dtype: torch.dtype = torch.float32
    parallel: Parallel = WHOLE

    def build(
        self,
        subject: str,
        model_class: Any,
        config: ModelConfig | DraftConfig,
        *,
        dtype: torch.dtype,
        parallel: Parallel,
        findings: Findings,
    ) -> None:
        """Make the module tree without memory, and measure it; a finding, and no model, where it
        cannot be built or lacks part of its interface."""
        interface = Draft if isinstance(config, DraftConfig) else Target
        missing = missing_members(model_class, interface)
        if missing:
            findings.error(
                subject,
                "interface-members-missing",
                f"{model_class.__name__} lacks {', '.join(missing)}",
                f"add them: contract.{interface.__name__} declares what speculation needs",
            )
            return
        try:
            self._make(model_class, config, dtype=dtype, parallel=parallel)
        except (EyasError, ValueError, NotImplementedError) as error:
            findings.error(subject, "model-cannot-be-built", str(error))

    def divided(self, parallel: Parallel) -> Side:
        """The same model, measured as one of several ranks holds it."""
        side = Side(self.checkpoint)
        if self.model is not None:
            side._make(type(self.model), self.config, dtype=self.dtype, parallel=parallel)
        return side

    def _make(
        self, model_class: Any, config: Any, *, dtype: torch.dtype, parallel: Parallel
    ) -> None:
        # One position: the rotary table is no weight, and a long one takes seconds.
        self.model = model_class(
            config, dtype=dtype, device="meta", max_model_len=1, parallel=parallel
        )
        self.config, self.dtype, self.parallel = config, dtype, parallel
        self.slots = weight_slots(self.model)
        self.weight_bytes = self.full_bytes = 0
        for slot in self.slots.values():
            size = slot.dtype.itemsize
            self.full_bytes += math.prod(slot.shape) * size
            if slot.is_here:
                self.weight_bytes += math.prod(slot.local_shape) * size


class SecondCopies(NamedTuple):
    """Bytes that are held beside the weights. packed: on a CPU, a packed head beside an embedding
    that is still looked up, and the draft's own packed copy of a head that it shares with the
    target. converted: what the draft shares with the target, where it runs in another dtype."""

    packed: int
    converted: int


def second_copies(
    target: ModelConfig,
    draft: DraftConfig | None,
    *,
    dtype: torch.dtype,
    draft_dtype: torch.dtype,
    parallel: Parallel,
) -> SecondCopies:
    """What embeddings and heads take a second time."""
    head = parallel.vocabulary(target.vocab_size).size * target.hidden_size
    shares_head = draft is not None and not draft.has_head
    packed = head * (target.tie_word_embeddings + shares_head) * dtype.itemsize
    if draft is None or dtype == draft_dtype:
        return SecondCopies(packed, 0)
    is_tied = draft.decoder.tie_word_embeddings or target.tie_word_embeddings
    num_converted = (not draft.has_embedding) + (shares_head and not is_tied)
    return SecondCopies(packed, num_converted * head * draft_dtype.itemsize)
