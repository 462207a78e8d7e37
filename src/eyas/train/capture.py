"""The target's side of a training batch: its features and last hidden states, by its own forward.

What a draft is trained on is captured by the very code that serves it (D3), with attention over
packed documents in place of the paged cache.

Shape suffixes: T rows, F features, H target hidden.
"""

from __future__ import annotations

import torch

from eyas.contract.target import Target, TargetOutput
from eyas.train.attention import CausalAttention
from eyas.train.packing import Batch


@torch.no_grad()
def capture(target: Target, batch: Batch, boundaries: tuple[int, ...]) -> TargetOutput:
    """hidden_TH and features_TF of every row of the batch.

    Runs under no_grad and not under inference mode, whose tensors a backward cannot use.
    """
    before = target.captured_boundaries
    target.set_eagle3_layers_to_capture(boundaries)
    try:
        tokens_T = batch.token_T[: batch.num_rows]
        attention = CausalAttention(batch.documents, target.kv_layout)
        return target.forward(tokens_T, batch.position_T, attention)
    finally:
        target.set_eagle3_layers_to_capture(before)
