"""The decoder-only target that all families share: embedding, blocks, norm and head.

Shape suffixes: T tokens, H hidden, V vocabulary, F captured features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from eyas.contract.attention import Attention, KVLayout
from eyas.contract.target import GivenRows, LocalLogits, TargetOutput
from eyas.models.config import ModelConfig
from eyas.models.layers import GatedMLP, RMSNorm, RotaryEmbedding, SelfAttention
from eyas.models.linear import Linear
from eyas.models.residual import Stream, advance, use_as
from eyas.models.sharding import WHOLE, Parallel, VocabularyEmbedding
from eyas.types import EyasError


class DecoderLayer(nn.Module):
    """One pre-norm transformer block."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel = WHOLE,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = self.make_attention(
            config, layer, dtype=dtype, device=device, parallel=parallel
        )
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = self.make_mlp(config, layer, dtype=dtype, device=device, parallel=parallel)
        if isinstance(self.self_attn, SelfAttention):
            use_as(self.self_attn.qkv_proj, "norm")

    def make_attention(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel = WHOLE,
    ) -> nn.Module:
        """The attention of this layer, for families to replace."""
        return SelfAttention(
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
        """The MLP of this layer, for families to replace."""
        return GatedMLP(config, dtype=dtype, device=device, parallel=parallel)

    def forward(
        self, hidden_TH: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """The residual stream [T, H] entering the next layer."""
        return self.advance(Stream(hidden_TH), rotary, attention).total()

    def advance(
        self, stream: Stream, rotary: tuple[Tensor, Tensor], attention: Attention
    ) -> Stream:
        """The same, with a last sum that may be left to the next layer."""
        stream = advance(self.self_attn, self.input_layernorm, stream, rotary, attention)
        return advance(self.mlp, self.post_attention_layernorm, stream)


class Decoder(nn.Module):
    """Embedding, blocks and final norm: the checkpoint's `model.*`."""

    def __init__(
        self,
        config: ModelConfig,
        layer_class: type[DecoderLayer],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel = WHOLE,
    ) -> None:
        super().__init__()
        shard = parallel.vocabulary(config.vocab_size)
        weight = torch.empty(shard.size, config.hidden_size, dtype=dtype, device=device)
        self.embed_tokens: nn.Embedding = VocabularyEmbedding(weight, shard, parallel.group)
        self.layers = nn.ModuleList(
            layer_class(config, layer, dtype=dtype, device=device, parallel=parallel)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)


class DecoderForCausalLM(nn.Module):
    """A decoder-only target, which families derive from; implements contract.target.Target.

    Weights are uninitialised until loaded. max_model_len: longest sequence served
    (default: the config's max_position_embeddings). layer_class: what a family's layers are.
    """

    layer_class: type[DecoderLayer] = DecoderLayer

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int | None = None,
        parallel: Parallel = WHOLE,
    ) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel
        self.model = Decoder(
            config, self.layer_class, dtype=dtype, device=device, parallel=parallel
        )
        tied, shard = config.tie_word_embeddings, parallel.vocabulary(config.vocab_size)
        self.lm_head = Linear(
            config.hidden_size, shard, dtype=dtype, device="meta" if tied else device
        )
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight  # type: ignore[assignment]
        self.rotary = RotaryEmbedding(
            config.rope,
            config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            max_model_len=max_model_len or config.max_position_embeddings,
            dtype=dtype,
            device=device,
        )
        self._boundaries: tuple[int, ...] = ()

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return self.config.num_layers

    @property
    def kv_layout(self) -> KVLayout:
        """Layout of its keys and values."""
        c, num_kv_heads = self.config, self.parallel.attention(self.config).kv.size
        return KVLayout(c.num_layers, num_kv_heads, c.head_dim, c.head_dim)

    @property
    def captured_boundaries(self) -> tuple[int, ...]:
        """Boundaries captured by the next forward, ascending."""
        return self._boundaries

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """(embedding [V, H], head [V, H]), this rank's rows; shared, not copied."""
        return self.model.embed_tokens.weight, self.lm_head.weight

    def set_embed_and_head(self, embed_VH: Tensor, head_VH: Tensor) -> None:
        """Replace embedding and head. Raises EyasError if a shape differs."""
        num_rows = self.parallel.vocabulary(self.config.vocab_size).size
        shape = (num_rows, self.config.hidden_size)
        if tuple(embed_VH.shape) != shape or tuple(head_VH.shape) != shape:
            raise EyasError(
                f"embedding and head must be {shape}, not {tuple(embed_VH.shape)} and "
                f"{tuple(head_VH.shape)}"
            )
        self.model.embed_tokens.weight = nn.Parameter(embed_VH, False)
        self.lm_head.weight = nn.Parameter(head_VH, False)
        self.lm_head.packed = None

    def set_eagle3_layers_to_capture(self, boundaries: Sequence[int]) -> None:
        """Choose the boundaries to capture (D3). Raises EyasError outside 0..num_layers."""
        wrong = [b for b in boundaries if not 0 <= b <= self.num_layers]
        if wrong:
            raise EyasError(f"boundaries {wrong} are outside 0..{self.num_layers}")
        if list(boundaries) != sorted(set(boundaries)):
            raise EyasError(f"boundaries must ascend without repeats, not {list(boundaries)}")
        self._boundaries = tuple(boundaries)

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        given: GivenRows | None = None,
    ) -> TargetOutput:
        """One pass over T rows (tokens, positions: int64), some of which may be given."""
        hidden_TH = self.model.embed_tokens(tokens_T)
        if given is not None:
            hidden_TH = hidden_TH.index_copy(0, given.row_N, given.embed_NH)
        rotary, stream = self.rotary(positions_T), Stream(hidden_TH)
        captured = []
        for layer, block in enumerate(cast(Iterable[DecoderLayer], self.model.layers)):
            if layer in self._boundaries:
                stream = Stream(stream.total())
                captured.append(stream.hidden_TH)
            stream = block.advance(stream, rotary, attention)
        hidden_TH, normed_TH = self.model.norm.enter(stream)
        if self.num_layers in self._boundaries:
            captured.append(hidden_TH)
        features_TF = torch.cat(captured, dim=-1) if captured else None
        return TargetOutput(normed_TH, features_TF)

    def compute_logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, V] of final-normed hidden states."""
        return self.compute_local_logits(hidden_TH).whole_TV

    def compute_local_logits(self, hidden_TH: Tensor) -> LocalLogits:
        """The same, of this rank's ids alone."""
        part = self.parallel.vocabulary_part(self.config.vocab_size)
        return LocalLogits(self.lm_head(hidden_TH), part)
