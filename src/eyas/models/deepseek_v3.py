"""DeepSeek-V2 and V3, and what has their shape (Kimi-K2): latent attention and experts.

The two differ in how tokens choose experts, which is configuration (`models.moe`).
"""

from __future__ import annotations

import torch
from torch import nn

from eyas.contract.attention import KVLayout
from eyas.models.config import ModelConfig
from eyas.models.decoder import DecoderForCausalLM, DecoderLayer
from eyas.models.latent import LatentAttention, latent_layout
from eyas.models.moe import MixtureOfExperts
from eyas.models.sharding import WHOLE, Parallel
from eyas.models.weight_slots import StoredNames


class DeepseekLayer(DecoderLayer):
    """A block with latent attention, and experts from some layer on."""

    def make_attention(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel = WHOLE,
    ) -> nn.Module:
        """Latent attention."""
        return LatentAttention(
            config,
            layer,
            in_features=config.hidden_size,
            dtype=dtype,
            device=device,
            parallel=parallel,
        )

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


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    """DeepseekV2ForCausalLM and DeepseekV3ForCausalLM; implements contract.target.Target."""

    layer_class = DeepseekLayer

    @property
    def kv_layout(self) -> KVLayout:
        """One latent a token and layer, for all heads."""
        assert self.config.latent is not None
        return latent_layout(self.config.num_layers, self.config.latent)

    def stored_names(self) -> StoredNames:
        """Checkpoints of V3 hold multi-token-prediction layers behind the last one."""
        first = self.config.num_layers
        layers = range(first, first + self.config.num_mtp_layers)
        reason = "a multi-token-prediction layer, which EAGLE-3 drafting does not use"
        return StoredNames(ignored={f"model.layers.{layer}.": reason for layer in layers})
