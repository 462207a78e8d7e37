"""Canonical shapes of targets and drafts, whatever the checkpoint's own spelling was.

`target_config` and `draft_config` read config.json into these.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

DraftFormat = Literal["safeailab", "specforge", "speculators"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. kind: "default", "llama3", "linear", "dynamic", "yarn".

    theta: base. partial: share of the head that is rotated. The rest are the scaling's own
    parameters as config.json names them; those that a kind does not use are None.
    """

    theta: float = 10000.0
    kind: str = "default"
    partial: float = 1.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention (Llama, Qwen2, Qwen3 dense)."""

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    dtype: str | None = None  # as stored: "float32", "bfloat16", "float16"
    eos_token_ids: tuple[int, ...] = ()  # config.json and generation_config.json together
    bos_token_id: int | None = None
    quantization: str | None = None  # quant_method, None when plain
    sliding_window: int | None = None  # of the layers that have one, None when none does


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """An EAGLE-3 draft, normalised from any of its formats (reference: EAGLE-3, sections 1-2).

    decoder: shape of its layer(s); decoder.vocab_size is the embedding's (the target's tokens).
    boundaries: target boundaries it reads (D3). boundary_rule: the rule that translated the
    checkpoint's layer ids, for the log. has_embedding / has_head: whether the checkpoint brings
    its own; else the target's is shared. Without a head, decoder.tie_word_embeddings says that the
    head is the embedding which the draft uses (its own, if it has one), else it is the target's
    head. has_d2t: whether a vocabulary map is stored.
    """

    format: DraftFormat
    decoder: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    boundaries: tuple[int, ...]
    boundary_rule: str
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    has_embedding: bool = False
    has_head: bool = True
    has_d2t: bool = True

    @property
    def num_features(self) -> int:
        """Width of the concatenated captured states."""
        return len(self.boundaries) * self.target_hidden_size
