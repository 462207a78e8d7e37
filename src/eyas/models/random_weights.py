"""Random weights in place of a checkpoint's, made where the parameters live, for benchmarks.

Scaled so that a forward stays in range: a linear keeps the variance of its input, what a block
adds to the residual stream shrinks with the number of blocks, norms are 1. Logits are about
standard normal then, whatever the sizes.

Shape suffixes: V draft vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from eyas.models.eagle3 import Eagle3Draft

# Projections whose output is added to the residual stream.
_INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight")
_BIAS_SCALE = 0.02


@torch.no_grad()
def fill_random(model: nn.Module, *, num_layers: int, seed: int) -> None:
    """Fill every parameter of a plain float model; the same seed gives the same on one device.

    num_layers: blocks that add to the residual stream. A shared parameter is filled once; a
    draft's vocabulary map takes target tokens at even distances.
    """
    generators: dict[torch.device, torch.Generator] = {}
    residual_scale = 1 / math.sqrt(2 * num_layers)
    for name, parameter in model.named_parameters():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        if parameter.dim() == 1 and not name.endswith("bias"):
            parameter.fill_(1.0)
            continue
        scale = _BIAS_SCALE if parameter.dim() == 1 else 1 / math.sqrt(parameter.shape[-1])
        if name.endswith(_INTO_RESIDUAL):
            scale *= residual_scale
        parameter.normal_(0.0, scale, generator=generators[device])
    if isinstance(model, Eagle3Draft) and model.config.has_d2t:
        model.d2t.copy_(even_map(model.draft_vocab_size, model.config.decoder.vocab_size))


def even_map(draft_vocab_size: int, vocab_size: int) -> Tensor:
    """A d2t map (int64 [V], target id less draft id) that takes tokens at even distances."""
    ids = torch.arange(draft_vocab_size)
    return ids * vocab_size // draft_vocab_size - ids
