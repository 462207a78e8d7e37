"""Building blocks shared by all models: norm, rotary embedding, attention, MLP.

Shape suffixes: T tokens, H hidden, I intermediate, D head size; heads are counted by Nq and Nk.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.config import MAX_TREE_NODES
from eyas.contract.attention import Attention, HeadNorms
from eyas.models.config import ModelConfig, QuantizedPart, RopeConfig
from eyas.models.linear import Linear
from eyas.models.quantization import make_linear
from eyas.models.residual import Stream, linear_add, norm_gated, norm_linear, use_as
from eyas.models.rope import rope_frequencies, yarn_attention_factor
from eyas.models.sharding import WHOLE, Parallel


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), False)
        self.eps = eps

    def forward(self, x_TH: Tensor) -> Tensor:
        """[..., H] -> [..., H], computed in fp32."""
        return kernels.rms_norm(x_TH, self.weight, self.eps)

    def add(self, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, norm(x + delta)), each [..., H]."""
        return kernels.add_rms_norm(x_TH, delta_TH, self.weight, self.eps)

    def enter(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """(the stream's sum, its norm), each [T, H]."""
        if stream.delta_TH is None:
            return stream.hidden_TH, self(stream.hidden_TH)
        return self.add(stream.hidden_TH, stream.delta_TH)


class RotaryEmbedding:
    """cos and sin by position as a table, made once.

    The table reaches a whole tree past max_model_len, since drafted tokens may lie there.
    Scaling kinds and their defaults are those of transformers. "dynamic" depends on a sequence's
    length there, which would rotate cached keys anew as it grows; here it is made once for
    max_model_len (and is the plain rotation up to max_position_embeddings).
    Raises ValueError on a scaling kind that is not implemented (the check reports it earlier).
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        *,
        max_position_embeddings: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        stretch = max(1.0, max_model_len / max_position_embeddings)
        inv_freq = rope_frequencies(rope, int(head_dim * rope.partial), stretch=stretch)
        scale = yarn_attention_factor(rope) if rope.kind == "yarn" else 1.0
        position = torch.arange(max_model_len + MAX_TREE_NODES, dtype=torch.float32)
        angle = position[:, None] * inv_freq
        cos, sin = angle.cos() * scale, angle.sin() * scale
        # One row a position and one for all heads; the sign is what kernels.apply_rope expects.
        self.cos_P1D = torch.cat((cos, cos), dim=-1)[:, None].to(device=device, dtype=dtype)
        self.sin_P1D = torch.cat((-sin, sin), dim=-1)[:, None].to(device=device, dtype=dtype)

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos [T, 1, D], sin [T, 1, D] with its first half negated) of int64 positions."""
        return self.cos_P1D.index_select(0, positions_T), self.sin_P1D.index_select(0, positions_T)


class SelfAttention(nn.Module):
    """Grouped-query attention with merged qkv; `in_features` may be 2H (an EAGLE-3 draft)."""

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
        self.layer = layer
        heads = parallel.attention(config)
        self.num_heads, self.num_kv_heads, self.group = heads.q.size, heads.kv.size, heads.group
        self.head_dim = config.head_dim
        num_q, num_kv = heads.q.times(self.head_dim), heads.kv.times(self.head_dim)
        quant = config.quant_of("attention")
        self.qkv_proj = make_linear(
            in_features,
            {"q_proj": num_q, "k_proj": num_kv, "v_proj": num_kv},
            bias=config.qkv_bias,
            quant=quant,
            dtype=dtype,
            device=device,
        )
        self.o_proj = make_linear(
            num_q, config.hidden_size, bias=config.o_bias, quant=quant, dtype=dtype, device=device
        )
        use_as(self.o_proj, "add")
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            eps = config.rms_norm_eps
            self.q_norm = RMSNorm(self.head_dim, eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(self.head_dim, eps, dtype=dtype, device=device)

    def keys_values(self, x_TH: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What is cached of the rows: k [T, Nk, D], rotated, and v [T, Nk, D]."""
        _, k, v = self.project(x_TH, rotary)
        return k, v

    def store(self, x_TH: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> None:
        """Write the rows' keys and values, and nothing more."""
        qkv_proj, num_q = self.qkv_proj, self.num_heads * self.head_dim
        kv_TE = None
        if x_TH.is_cuda and isinstance(qkv_proj, Linear):  # not packed: a part of it can be run
            kv_TE = qkv_proj.outputs_from(x_TH, num_q)
        if kv_TE is not None and hasattr(attention, "rotate_and_write"):
            q_THD = attention.rotate_and_write(
                self.layer, kv_TE, rotary, num_heads=0, norms=self._norms()
            )
            if q_THD is not None:
                return
        attention.write(self.layer, *self.keys_values(x_TH, rotary))

    def project(self, x_TH: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, Nq, D] and k [T, Nk, D], rotated, and v [T, Nk, D]."""
        return self._rotated(self.qkv_proj(x_TH), rotary)

    def _rotated(
        self, qkv_TE: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv_TE.view(len(qkv_TE), -1, self.head_dim)
        num_q, num_k = self.num_heads, self.num_kv_heads
        qk, v = torch.split(heads, [num_q + num_k, num_k], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :num_q]), self.k_norm(qk[:, num_q:])), dim=1)
        q, k = torch.split(kernels.apply_rope(qk, *rotary), [num_q, num_k], dim=1)
        return q, k, v

    def forward(self, x_TH: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """[T, in] -> [T, H]."""
        out_TE = self._attend(self.qkv_proj(x_TH), rotary, attention)
        return self.group.all_reduce(self.o_proj(out_TE))

    def advance(
        self, norm: RMSNorm, stream: Stream, rotary: tuple[Tensor, Tensor], attention: Attention
    ) -> Stream:
        """stream + self(norm(stream))."""
        hidden_TH, qkv_TE = norm_linear(norm, self.qkv_proj, stream)
        return self.add_to(hidden_TH, qkv_TE, rotary, attention)

    def add_to(
        self,
        hidden_TH: Tensor,
        qkv_TE: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Stream:
        """hidden + what follows the projection qkv [T, (Nq + 2 Nk) * D]."""
        out_TE = self._attend(qkv_TE, rotary, attention)
        return linear_add(self.o_proj, out_TE, hidden_TH, group=self.group)

    def _attend(
        self, qkv_TE: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """Rotate, store and attend [T, Nq * D]: in as few steps as the attention offers."""
        layer, num_heads, norms = self.layer, self.num_heads, self._norms()
        if hasattr(attention, "attend_projection"):
            out_TE = attention.attend_projection(
                layer, qkv_TE, rotary, num_heads=num_heads, norms=norms
            )
            if out_TE is not None:
                return out_TE  # type: ignore[no-any-return]
        q_THD = None
        if hasattr(attention, "rotate_and_write"):
            q_THD = attention.rotate_and_write(
                layer, qkv_TE, rotary, num_heads=num_heads, norms=norms
            )
        if q_THD is None:
            q_THD, k_TKD, v_TKD = self._rotated(qkv_TE, rotary)
            attention.write(layer, k_TKD, v_TKD)
        return attention.attend(layer, q_THD)

    def _norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)). size: None is the config's intermediate_size."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        size: int | None = None,
        part: QuantizedPart = "mlp",
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel = WHOLE,
    ) -> None:
        super().__init__()
        inner = parallel.mlp(config, size or config.intermediate_size, part)
        self.group, bias = parallel.group_of(inner), config.mlp_bias
        quant = config.quant_of(part)
        self.gate_up_proj = make_linear(
            config.hidden_size,
            {"gate_proj": inner, "up_proj": inner},
            bias=bias,
            quant=quant,
            dtype=dtype,
            device=device,
        )
        self.down_proj = make_linear(
            inner, config.hidden_size, bias=bias, quant=quant, dtype=dtype, device=device
        )
        use_as(self.gate_up_proj, "gated")
        use_as(self.down_proj, "add")

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.group.all_reduce(self.partial(x_TH))

    def advance(self, norm: RMSNorm, stream: Stream) -> Stream:
        """stream + self(norm(stream))."""
        hidden_TH, inner_TI = norm_gated(norm, self.gate_up_proj, stream)
        return linear_add(self.down_proj, inner_TI, hidden_TH, group=self.group)

    def partial(self, x_TH: Tensor) -> Tensor:
        """This rank's part of the sum that is the output."""
        return self.down_proj(kernels.silu_mul(self.gate_up_proj(x_TH)))  # type: ignore[no-any-return]
