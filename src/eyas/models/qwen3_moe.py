"""Qwen3 with a mixture of experts instead of the MLP."""

from __future__ import annotations

import torch
from torch import nn

from eyas.models.config import ModelConfig
from eyas.models.decoder import DecoderForCausalLM, DecoderLayer
from eyas.models.moe import MixtureOfExperts
from eyas.models.sharding import WHOLE, Parallel


class Qwen3MoeLayer(DecoderLayer):
    """A block with experts, but in the layers that config.json names as dense."""

    def make_mlp(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel = WHOLE,
    ) -> nn.Module:
        """Experts in the layers that have them."""
        if config.experts is not None and layer in config.experts.layers:
            return MixtureOfExperts(config, dtype=dtype, device=device, parallel=parallel)
        return super().make_mlp(config, layer, dtype=dtype, device=device, parallel=parallel)


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3MoeForCausalLM; implements contract.target.Target."""

    layer_class = Qwen3MoeLayer
