"""The EAGLE-3 draft: one layer whose attention reads [embedding, hidden] (2H wide), with
grouped-query (Llama) or latent attention (DeepSeek) and a dense MLP.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test" (2025), section 3; the norm variants are those of EAGLE-3.1, ModelOpt and speculators.

Shape suffixes: T rows, F captured features, H draft hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.contract.attention import Attention, KVLayout
from eyas.contract.draft import DraftOutput
from eyas.contract.target import Target
from eyas.kernels.native_draft import DraftStep, DraftWeights, Norm, Place, plan_draft_step
from eyas.models.config import DraftConfig
from eyas.models.latent import LatentAttention, latent_layout
from eyas.models.layers import GatedMLP, RMSNorm, RotaryEmbedding, SelfAttention
from eyas.models.linear import Linear
from eyas.models.residual import Stream, norm_linear, use_as
from eyas.models.sharding import WHOLE, Parallel, VocabularyEmbedding
from eyas.types import EyasError


class Eagle3Layer(nn.Module):
    """The draft's decoder layer: the residual is the hidden input, the embedding only informs."""

    def __init__(
        self,
        config: DraftConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel = WHOLE,
    ) -> None:
        super().__init__()
        decoder = config.decoder
        size, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        attention = LatentAttention if decoder.latent is not None else SelfAttention
        self.self_attn = attention(
            decoder, 0, in_features=2 * size, dtype=dtype, device=device, parallel=parallel
        )
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(decoder, dtype=dtype, device=device, parallel=parallel)
        self.norm_before_residual = config.norm_before_residual

    def attention_input(
        self, embed_tokens: VocabularyEmbedding, tokens_T: Tensor, hidden_TH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(input of qkv [T, 2H], residual [T, H]); the embedding comes first."""
        if hidden_TH.is_cuda and embed_tokens.group.size == 1:  # one kernel there
            norms = [(n.weight, n.eps) for n in (self.input_layernorm, self.hidden_norm)]
            x = kernels.pair_norm(
                tokens_T, embed_tokens.weight, hidden_TH, norms=(norms[0], norms[1])
            )
            normed_TH = x[:, hidden_TH.shape[1] :]
        else:
            normed_TH = self.hidden_norm(hidden_TH)
            embedded_TH = self.input_layernorm(embed_tokens(tokens_T))
            x = torch.cat((embedded_TH, normed_TH), dim=-1)
        return x, normed_TH if self.norm_before_residual else hidden_TH

    def forward(
        self, x: Tensor, residual_TH: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention
    ) -> Stream:
        """The pre-norm output of the layer, of what `attention_input` made."""
        if isinstance(self.self_attn, SelfAttention):
            qkv_TE = self.self_attn.qkv_proj(x)
            stream = self.self_attn.add_to(residual_TH, qkv_TE, rotary, attention)
        else:
            stream = Stream(residual_TH, self.self_attn(x, rotary, attention))
        return self.mlp.advance(self.post_attention_layernorm, stream)


class Eagle3Draft(nn.Module):
    """Implements contract.draft.Draft. Weights are uninitialised until loaded.

    Call `share_with_target` once before use: it takes the target's embedding and head where the
    checkpoint has none of its own.
    """

    d2t: Tensor

    def __init__(
        self,
        config: DraftConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int | None = None,
        parallel: Parallel = WHOLE,
    ) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel
        decoder, size = config.decoder, config.decoder.hidden_size
        eps, width = decoder.rms_norm_eps, config.num_features
        self.input_norm = self.fc_norm = None
        if config.norm_before_fc:
            self.input_norm = RMSNorm(width, eps, dtype=dtype, device=device)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, eps, dtype=dtype, device=device)
                for _ in config.boundaries
            )
        self.fc = Linear(width, size, bias=config.fc_bias, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            [Eagle3Layer(config, dtype=dtype, device=device, parallel=parallel)]
        )
        self.norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.embed_tokens: VocabularyEmbedding | None = None
        if config.has_embedding:
            shard = parallel.vocabulary(decoder.vocab_size)
            weight = torch.empty(shard.size, size, dtype=dtype, device=device)
            self.embed_tokens = VocabularyEmbedding(weight, shard, parallel.group)
        self.lm_head: Linear | None = None
        if config.has_head:
            shard = parallel.vocabulary(config.draft_vocab_size)
            self.lm_head = Linear(size, shard, dtype=dtype, device=device)
        if config.has_d2t:
            empty = torch.empty(config.draft_vocab_size, dtype=torch.int64, device=device)
            self.register_buffer("d2t", empty)
        self.rotary = RotaryEmbedding(
            decoder.rope,
            decoder.head_dim,
            max_position_embeddings=decoder.max_position_embeddings,
            max_model_len=max_model_len or decoder.max_position_embeddings,
            dtype=dtype,
            device=device,
        )
        self._target_ids: Tensor | None = None
        self._step: DraftStep | None = None

    def share_with_target(self, target: Target) -> None:
        """Take embedding and head from the target where the checkpoint has none; finish d2t.

        Raises EyasError when widths make sharing impossible.
        """
        embed_VH, head_VH = target.get_embed_and_head()
        dtype = self.fc.weight.dtype
        if self.embed_tokens is None:
            self._require_width("embedding", embed_VH)
            shard = self.parallel.vocabulary(target.vocab_size)
            self.embed_tokens = VocabularyEmbedding(
                embed_VH.detach().to(dtype), shard, self.parallel.group
            )
        if self.lm_head is None:
            if self.config.decoder.tie_word_embeddings:
                head_VH = self.embed_tokens.weight
            self._require_width("head", head_VH)
            shard = self.parallel.vocabulary(self.draft_vocab_size)
            self.lm_head = Linear(self.hidden_size, shard, dtype=dtype, device="meta")
            self.lm_head.weight = nn.Parameter(head_VH.detach().to(dtype), False)
        if not self.config.norm_output:
            use_as(self.lm_head, "norm")
        ids = torch.arange(self.draft_vocab_size, device=embed_VH.device)
        self._target_ids = ids + self.d2t if self.config.has_d2t else ids

    def _require_width(self, what: str, weight_VH: Tensor) -> None:
        if weight_VH.shape[1] != self.hidden_size:
            raise EyasError(
                f"the draft (hidden {self.hidden_size}) has no {what} of its own and cannot share "
                f"the target's (hidden {weight_VH.shape[1]})"
            )

    @property
    def hidden_size(self) -> int:
        """Width of the draft's hidden state."""
        return self.config.decoder.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        """Rows of the head."""
        return self.config.draft_vocab_size

    @property
    def kv_layout(self) -> KVLayout:
        """One layer of keys and values."""
        decoder = self.config.decoder
        if decoder.latent is not None:
            return latent_layout(1, decoder.latent)
        num_kv_heads = self.parallel.attention(decoder).kv.size
        return KVLayout(1, num_kv_heads, decoder.head_dim, decoder.head_dim)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Target boundaries that are read, lowest first."""
        return self.config.boundaries

    @property
    def target_ids_V(self) -> Tensor:
        """int64 [V]: the target's token id of each draft id."""
        assert self._target_ids is not None, "share_with_target has not been called"
        return self._target_ids

    def fuse(self) -> bool:
        """Take one call for a step of few rows where the device and this draft's shape allow it.

        Once, after share_with_target and before the linears are packed; the weights must not
        change any more. Returns whether it did.
        """
        layer, config = self._layer, self.config
        decoder, attend = config.decoder, layer.self_attn
        if not isinstance(attend, SelfAttention):
            return False
        linears = [attend.qkv_proj, attend.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
        is_plain = all(type(linear) is Linear and linear.bias is None for linear in linears)
        if not is_plain or decoder.qk_norm or self.parallel.group.size > 1:
            return False
        assert self.embed_tokens is not None and self.lm_head is not None
        normed = self.input_norm is not None or self.fc_norm is not None
        qkv, o, gate_up, down = (linear.weight for linear in linears)
        self._step = plan_draft_step(
            DraftWeights(
                embed_NH=self.embed_tokens.weight,
                input_norm=_norm(layer.input_layernorm),
                hidden_norm=_norm(layer.hidden_norm),
                post_norm=_norm(layer.post_attention_layernorm),
                last_norm=_norm(self.norm),
                qkv=qkv,
                o=o,
                gate_up=gate_up,
                down=down,
                head_VH=self.lm_head.weight,
                fc=None if normed or self.fc.bias is not None else self.fc.weight,
                cos_PD=self.rotary.cos_P1D.squeeze(1),
                sin_PD=self.rotary.sin_P1D.squeeze(1),
                num_heads=decoder.num_heads,
                num_kv_heads=decoder.num_kv_heads,
                head_dim=decoder.head_dim,
                norm_before_residual=config.norm_before_residual,
                norm_output=config.norm_output,
            )
        )
        return self._step is not None

    def bind(self, slot: int, prompt_token_ids: Sequence[int]) -> None:
        """Nothing to do: this draft keeps no state by slot."""

    def combine(self, features_TF: Tensor) -> Tensor:
        """s = fc(features), with the norm that the checkpoint puts before it; [T, H]."""
        if self._step is not None:
            combined_TH = self._step.combine(features_TF)
            if combined_TH is not None:
                return combined_TH
        features_TF = features_TF.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            features_TF = self.input_norm(features_TF)
        if self.fc_norm is not None:
            chunks = features_TF.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            features_TF = torch.cat(normed, dim=-1)
        return self.fc(features_TF)  # type: ignore[no-any-return]

    @property
    def _layer(self) -> Eagle3Layer:
        return cast(Eagle3Layer, self.layers[0])

    def _input(self, tokens_T: Tensor, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        assert self.embed_tokens is not None, "share_with_target has not been called"
        return self._layer.attention_input(self.embed_tokens, tokens_T, hidden_TH)

    def write_kv(
        self, tokens_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attention: Attention
    ) -> None:
        """Store keys and values of the pairs; no attention, MLP or head runs."""
        if self._step is not None and self._step.write(
            tokens_T, hidden_TH, positions_T, cast(Place, attention)
        ):
            return
        attend, rotary = self._layer.self_attn, self.rotary(positions_T)
        x, _ = self._input(tokens_T, hidden_TH)
        if isinstance(attend, SelfAttention):
            attend.store(x, rotary, attention)
        else:
            attention.write(0, *attend.keys_values(x, rotary))

    def forward(
        self,
        tokens_T: Tensor,
        hidden_TH: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        attention: Attention,
    ) -> DraftOutput:
        """One draft step (slots_T is not needed by this draft)."""
        assert self.lm_head is not None, "share_with_target has not been called"
        if self._step is not None:
            done = self._step(tokens_T, hidden_TH, positions_T, cast(Place, attention))
            if done is not None:
                return DraftOutput(*done)
        x, residual_TH = self._input(tokens_T, hidden_TH)
        stream = self._layer(x, residual_TH, self.rotary(positions_T), attention)
        if self.config.norm_output:
            _, feedback_TH = self.norm.enter(stream)
            logits_TV = self.lm_head(feedback_TH)
        else:
            feedback_TH, logits_TV = norm_linear(self.norm, self.lm_head, stream)
        part = self.parallel.vocabulary_part(self.draft_vocab_size)
        return DraftOutput(logits_TV, feedback_TH, part)


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)
