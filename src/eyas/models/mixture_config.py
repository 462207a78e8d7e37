"""Latent attention and mixtures of experts from a config.json.

Defaults of absent keys are those of each family's configuration class in transformers 5.
"""

from __future__ import annotations

from typing import Literal

from eyas.models.config import ExpertsConfig, LatentConfig
from eyas.models.config_file import Fields

ExpertsKind = Literal["deepseek_v2", "deepseek_v3", "qwen3_moe"]


def read_latent(fields: Fields, *, always_interleaved: bool = False) -> LatentConfig:
    """Sizes of latent attention. A q_lora_rank of null is no compression; absent is 1536."""
    rank = fields.optional_integer("q_lora_rank")
    if "q_lora_rank" not in fields.data:
        rank = 1536
    latent = LatentConfig(
        q_lora_rank=rank,
        kv_lora_rank=fields.integer("kv_lora_rank", 512),
        nope_head_dim=fields.integer("qk_nope_head_dim", 128),
        rope_head_dim=fields.integer("qk_rope_head_dim", 64),
        v_head_dim=fields.integer("v_head_dim", 128),
        interleaved=always_interleaved or fields.flag("rope_interleave", True),
    )
    if latent.rope_head_dim % 2:
        fields.problems.append(f"qk_rope_head_dim must be even, not {latent.rope_head_dim}")
    return latent


def read_experts(fields: Fields, kind: ExpertsKind, *, num_layers: int) -> ExpertsConfig | None:
    """The experts of a target; None where no layer has any."""
    read = {"deepseek_v2": _deepseek_v2, "deepseek_v3": _deepseek_v3, "qwen3_moe": _qwen3_moe}
    experts = read[kind](fields, num_layers)
    chosen, total = experts.num_experts_per_token, experts.num_experts
    groups = experts.num_groups
    if total % groups or experts.topk_groups > groups:
        fields.problems.append(
            f"{total} experts in {groups} groups, of which {experts.topk_groups} are chosen, do "
            "not go together"
        )
    elif chosen > total // groups * experts.topk_groups:
        fields.problems.append(
            f"num_experts_per_tok {chosen} is more than the experts to choose from"
        )
    elif experts.group_score == "top2" and groups > 1 and total // groups < 2:
        fields.problems.append("a group needs two experts to be scored by its two best")
    return experts if experts.layers else None


def _deepseek_layers(fields: Fields, num_layers: int, first_dense: int) -> tuple[int, ...]:
    first = fields.integer("first_k_dense_replace", first_dense, least=0)
    step = fields.integer("moe_layer_freq", 1)
    return tuple(layer for layer in range(first, num_layers) if layer % step == 0)


def _deepseek_v2(fields: Fields, num_layers: int) -> ExpertsConfig:
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        fields.problems.append(
            f"topk_method must be greedy or group_limited_greedy, not {method!r}"
        )
    _require(fields, "scoring_func", "softmax")
    if fields.flag("norm_topk_prob", False):
        # The published code then drops the scaling, transformers drops the flag, others do both.
        fields.problems.append("norm_topk_prob must be false for DeepSeek-V2")
    limited = method == "group_limited_greedy"
    size = fields.integer("moe_intermediate_size", 1407)
    return ExpertsConfig(
        num_experts=fields.integer("n_routed_experts", 64),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=size,
        layers=_deepseek_layers(fields, num_layers, 0),
        shared_size=size * fields.integer("n_shared_experts", 2, least=0),
        num_groups=fields.integer("n_group") if limited else 1,
        topk_groups=fields.integer("topk_group") if limited else 1,
        scaling=fields.number("routed_scaling_factor", 1.0),
    )


def _deepseek_v3(fields: Fields, num_layers: int) -> ExpertsConfig:
    _require(fields, "topk_method", "noaux_tc")
    _require(fields, "scoring_func", "sigmoid")
    size = fields.integer("moe_intermediate_size", 2048)
    return ExpertsConfig(
        num_experts=fields.integer("n_routed_experts", 256),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=size,
        layers=_deepseek_layers(fields, num_layers, 3),
        shared_size=size * fields.integer("n_shared_experts", 1, least=0),
        scoring="sigmoid",
        num_groups=fields.integer("n_group", 8),
        topk_groups=fields.integer("topk_group", 4),
        group_score="top2",
        has_bias=True,
        normalizes=fields.flag("norm_topk_prob", True),
        scaling=fields.number("routed_scaling_factor", 2.5),
    )


def _qwen3_moe(fields: Fields, num_layers: int) -> ExpertsConfig:
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.data.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        fields.problems.append(f"mlp_only_layers must be a list of layers, not {dense!r}")
        dense = []
    # transformers 5 writes the number under its general name.
    key = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    layers = range(num_layers)
    return ExpertsConfig(
        num_experts=fields.integer(key, 128),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        layers=tuple(n for n in layers if n not in dense and (n + 1) % step == 0),
        normalizes=fields.flag("norm_topk_prob", False),
    )


def _require(fields: Fields, key: str, value: str) -> None:
    found = fields.text(key, value)
    if found != value:
        fields.problems.append(f"{key} must be {value} for this architecture, not {found!r}")
