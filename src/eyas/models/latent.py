"""Multi-head latent attention (MLA), absorbed: queries meet the compressed keys as they are cached.

A token leaves one vector for all heads: the normed latent, from which keys and values of every
head could be made, and one rotated key. The matrices that would expand the latent are applied to
the queries and to the attention's output instead (DeepSeek-V2, 2024, section 2.1.2), so that the
cache is read once for all heads and the value is the first part of the key.

Shape suffixes: T tokens, H heads, C cached (latent and rotated part), L latent, N not rotated,
R rotated, V value elements of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.contract.attention import Attention, KVLayout
from eyas.models.config import LatentConfig, ModelConfig
from eyas.models.layers import RMSNorm
from eyas.models.quantization import StoredWeight, make_linear
from eyas.models.rope import latent_softmax_scale
from eyas.models.sharding import WHOLE, Parallel, Size

LATENT_EPS = 1e-6  # the latents' norms keep DeepSeek's default whatever rms_norm_eps says


def latent_layout(num_layers: int, latent: LatentConfig) -> KVLayout:
    """One vector a token and layer, whose first part is the value."""
    return KVLayout(num_layers, 1, latent.cached_dim, 0, value_in_key=latent.kv_lora_rank)


class LatentAttention(nn.Module):
    """MLA; `in_features` may be 2H (an EAGLE-3 draft)."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        in_features: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel = WHOLE,
    ) -> None:
        super().__init__()
        assert config.latent is not None
        heads = parallel.attention(config)
        self.layer, self.num_heads, self.group = layer, heads.q.size, heads.group
        self.latent = config.latent
        latent, quant = config.latent, config.quant_of("attention")

        def linear(size_in: Size, size_out: Size, *, bias: bool = False) -> nn.Module:
            return make_linear(
                size_in, size_out, bias=bias, quant=quant, dtype=dtype, device=device
            )

        q_size = heads.q.times(latent.qk_head_dim)
        if latent.q_lora_rank is None:
            self.q_proj = linear(in_features, q_size)
        else:
            self.q_a_proj = linear(in_features, latent.q_lora_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(latent.q_lora_rank, LATENT_EPS, dtype=dtype, device=device)
            self.q_b_proj = linear(latent.q_lora_rank, q_size)
        self.kv_a_proj_with_mqa = linear(in_features, latent.cached_dim, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_lora_rank, LATENT_EPS, dtype=dtype, device=device)
        self.kv_b_proj = StoredWeight(
            latent.kv_lora_rank,
            heads.q.times(latent.nope_head_dim + latent.v_head_dim),
            quant=quant,
            dtype=dtype,
            device=device,
        )
        self.o_proj = linear(
            heads.q.times(latent.v_head_dim), config.hidden_size, bias=config.o_bias
        )
        self.scale = latent_softmax_scale(config.rope, latent.qk_head_dim)

    def keys_values(self, x_TI: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What is cached: [T, 1, C], and a value of no elements of its own."""
        sizes = [self.latent.kv_lora_rank, self.latent.rope_head_dim]
        latent_TL, rope_TR = torch.split(self.kv_a_proj_with_mqa(x_TI), sizes, dim=-1)
        rope_T1R = self._rotate(rope_TR[:, None], rotary)
        key_T1C = torch.cat((self.kv_a_layernorm(latent_TL)[:, None], rope_T1R), dim=-1)
        return key_T1C, key_T1C[..., :0]

    def forward(self, x_TI: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """[T, in] -> [T, hidden]."""
        latent = self.latent
        attention.write(self.layer, *self.keys_values(x_TI, rotary))
        expand_HEL = self.kv_b_proj.dense().view(self.num_heads, -1, latent.kv_lora_rank)
        keys_HNL, values_HVL = torch.split(
            expand_HEL, [latent.nope_head_dim, latent.v_head_dim], dim=1
        )
        if latent.q_lora_rank is None:
            q_TE = self.q_proj(x_TI)
        else:
            q_TE = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TI)))
        q_THE = q_TE.view(len(x_TI), self.num_heads, -1)
        nope_THN, rope_THR = torch.split(
            q_THE, [latent.nope_head_dim, latent.rope_head_dim], dim=-1
        )
        absorbed_THL = torch.bmm(nope_THN.transpose(0, 1), keys_HNL).transpose(0, 1)
        q_THC = torch.cat((absorbed_THL, self._rotate(rope_THR, rotary)), dim=-1)
        out_TE = attention.attend(self.layer, q_THC, scale=self.scale)
        out_HTL = out_TE.view(len(x_TI), self.num_heads, -1).transpose(0, 1)
        heads_THV = torch.bmm(out_HTL, values_HVL.transpose(1, 2)).transpose(0, 1)
        return self.group.all_reduce(self.o_proj(heads_THV.flatten(1)))

    def _rotate(self, x_THR: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotation of pairs (2i, 2i + 1), with the pairs taken apart first: queries and keys are
        reordered alike, which their product does not see."""
        if self.latent.interleaved:
            pairs = x_THR.reshape(*x_THR.shape[:-1], -1, 2)
            x_THR = pairs.transpose(-1, -2).flatten(-2)
        return kernels.apply_rope(x_THR, *rotary)
