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
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1). Sizes in elements of a head,
    but for the ranks of the compressed query (None: not compressed) and of the compressed keys and
    values. interleaved: a rotated pair is (2i, 2i + 1), as DeepSeek stores it, not (i, i + n / 2).
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    interleaved: bool = True

    @property
    def qk_head_dim(self) -> int:
        """Elements of a query's head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Elements that are cached for a token and layer, for all heads together."""
        return self.kv_lora_rank + self.rope_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in some of the layers, and how tokens choose among them.

    intermediate_size: of one expert; shared_size: of the shared experts together, 0 without.
    layers: those that have experts, the others have a plain MLP. num_groups, topk_groups: a token
    chooses within the best groups of experts; group_score says what a group is worth. has_bias: a
    bias corrects the scores for the choice, not for the weights. normalizes: weights add up to 1
    before they are multiplied by `scaling`.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    layers: tuple[int, ...]
    shared_size: int = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    has_bias: bool = False
    normalizes: bool = False
    scaling: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision tower of MoonViT's kind with its projector, and how images are cut for it.

    A patch is a square of patch_size pixels; merge_size × merge_size of them become one token.
    grid_size: rows and columns of learned positions. norm_eps: of the projector's norm.
    placeholder_id: the token that stands for an image in a prompt. max_patches, max_side_patches:
    an image of more is shrunk. mean, std: of the three colours, between 0 and 1. halves: a
    rotated pair is (i, i + n / 2), as transformers keeps it, not (2i, 2i + 1).
    """

    num_layers: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    patch_size: int = 14
    merge_size: int = 2
    grid_size: tuple[int, int] = (64, 64)
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    placeholder_id: int = 163605
    max_patches: int = 16384
    max_side_patches: int = 512
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    halves: bool = False

    @property
    def token_size(self) -> int:
        """Pixels a side of what becomes one token."""
        return self.patch_size * self.merge_size


QuantizedPart = Literal["attention", "mlp", "shared_experts", "experts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """A quantized storage that is read as it is.

    scheme: "int4", signed 4-bit integers with a scale for every group of `group_size` inputs
    (compressed-tensors "pack-quantized"); "fp8", e4m3 with a scale for every square of
    `group_size` outputs and inputs. parts: which linear layers are stored so.
    """

    scheme: Literal["int4", "fp8"]
    group_size: int
    parts: frozenset[QuantizedPart]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    latent: None for grouped-query attention; with it, head_dim is the rotated part of a head and
    num_kv_heads is 1. experts: None for a dense model. quant: how quantized weights are read, None
    for plain ones and for methods that are not supported. num_mtp_layers: multi-token-prediction
    layers that checkpoints store behind the last layer; they are not run. vision: None for a model
    that takes no images, or whose images are not to be served.
    """

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
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    quant: QuantConfig | None = None
    num_mtp_layers: int = 0
    vision: VisionConfig | None = None

    def quant_of(self, part: QuantizedPart) -> QuantConfig | None:
        """How the linear layers of a part are stored; None for plain weights."""
        return self.quant if self.quant is not None and part in self.quant.parts else None


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
