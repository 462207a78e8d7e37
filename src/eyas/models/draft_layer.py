"""The decoder layer and the norm flags of a draft, from its claims and its tensors."""

from __future__ import annotations

import dataclasses

from eyas.models.config import LatentConfig, ModelConfig
from eyas.models.config_file import read_dtype, read_quantization, read_rope
from eyas.models.draft_flags import read_flag
from eyas.models.draft_kind import architecture_of
from eyas.models.draft_source import DraftSource
from eyas.models.mixture_config import read_latent

ATTENTION, MLP = "layers.0.self_attn", "layers.0.mlp"


def read_decoder(source: DraftSource) -> ModelConfig:
    """Shape of the one layer. Its vocabulary and tied head are left open (0, False): they are
    settled together with the target's.

    The rotary base is the draft's own: 10000 where it names none, whatever the target's is.
    """
    layer = source.layer
    num_heads = layer.integer("num_attention_heads")
    num_kv_heads = layer.integer("num_key_value_heads", num_heads)
    max_positions = layer.integer("max_position_embeddings", 2048)
    claimed_layers = layer.integer("num_hidden_layers", 1)
    if claimed_layers != 1:
        source.contradict("num_hidden_layers", claimed_layers, "an EAGLE-3 draft of one is built")
    activation = layer.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        layer.problems.append(f"hidden_act must be silu, not {activation!r}")
    latent = _latent(source, num_heads)
    qkv_biases = [f"{ATTENTION}.{part}_proj.bias" for part in "qkv"]
    if latent is not None:
        qkv_biases = [f"{ATTENTION}.{part}.bias" for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    mlp_biases = [f"{MLP}.{part}_proj.bias" for part in ("gate", "up", "down")]
    hidden_size = layer.integer("hidden_size")
    attention_bias, mlp_bias = layer.flag("attention_bias", False), layer.flag("mlp_bias", False)
    qkv_bias = source.has(*qkv_biases, claimed=attention_bias, key="attention_bias")
    if latent is not None:
        num_kv_heads, head_dim = 1, latent.rope_head_dim
    else:
        head_dim = _head_dim(source, hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
    return ModelConfig(
        architecture=architecture_of(source.top.data),
        model_type=layer.text("model_type", "llama"),
        hidden_size=hidden_size,
        intermediate_size=source.layer_size(
            "intermediate_size", source.size(f"{MLP}.gate_proj.weight")
        ),
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=0,
        rms_norm_eps=layer.number("rms_norm_eps", 1e-6),
        rope=read_rope(layer, max_positions=max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        qkv_bias=qkv_bias,
        o_bias=f"{ATTENTION}.o_proj.bias" in source.stored,
        mlp_bias=source.has(*mlp_biases, claimed=mlp_bias, key="mlp_bias"),
        qk_norm=_qk_norm(source),
        dtype=read_dtype(source.top) or read_dtype(layer),
        quantization=read_quantization(source.top, source.folder)
        or read_quantization(layer, source.folder),
        sliding_window=_sliding_window(source),
        latent=latent,
    )


def _latent(source: DraftSource, num_heads: int) -> LatentConfig | None:
    """Sizes of latent attention, None for the Llama type. Told by the tensors; by the name of the
    architecture where there are none."""
    kv_a = f"{ATTENTION}.kv_a_proj_with_mqa.weight"
    is_latent = "Eagle3Deepseek" in architecture_of(source.top.data)
    if source.has_weights:
        is_latent = kv_a in source.stored
    if not is_latent:
        return None
    claimed = read_latent(source.layer)
    if not source.has_weights:
        return claimed

    def per_head(rows: int | None, less: int, other: int) -> int:
        fits = rows is not None and rows % num_heads == 0 and rows // num_heads > less
        return rows // num_heads - less if rows is not None and fits else other

    query = "q_proj" if f"{ATTENTION}.q_proj.weight" in source.stored else "q_b_proj"
    rank = source.size(f"{ATTENTION}.kv_a_layernorm.weight") or claimed.kv_lora_rank
    rope = (source.size(kv_a) or 0) - rank
    rope = rope if rope > 0 and rope % 2 == 0 else claimed.rope_head_dim
    q_rows = source.size(f"{ATTENTION}.{query}.weight")
    o_columns = source.size(f"{ATTENTION}.o_proj.weight", 1)
    latent = dataclasses.replace(
        claimed,
        q_lora_rank=source.size(f"{ATTENTION}.q_a_proj.weight"),
        kv_lora_rank=rank,
        rope_head_dim=rope,
        nope_head_dim=per_head(q_rows, rope, claimed.nope_head_dim),
        v_head_dim=per_head(o_columns, 0, claimed.v_head_dim),
    )
    fields = {"nope_head_dim": "qk_nope_head_dim", "rope_head_dim": "qk_rope_head_dim"}
    for name, value in dataclasses.asdict(latent).items():
        key, said = fields.get(name, name), getattr(claimed, name)
        if value != said and key in source.layer:
            source.contradict(key, said, f"the tensors show {value}")
    return latent


def read_norm_flags(source: DraftSource, *, norm_output: bool | None) -> dict[str, bool]:
    """The four norm flags by their names in DraftConfig. norm_output: an override."""
    places = (source.top, source.eagle)
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    claims = {name: read_flag(name, places, source.findings) for name in names}
    if claims["fc_norm"] is None:
        claims["fc_norm"] = read_flag("use_aux_norm", places, source.findings)
    tensors = {
        "norm_before_fc": "input_norm.weight" in source.stored,
        "fc_norm": any(name.startswith("fc_norm.") for name in source.stored),
    }
    for name, present in tensors.items():
        if present and claims[name] is False:
            source.findings.error(
                "draft",
                "draft-flags-disagree",
                f"config.json says {name} = false, but its weights are stored",
                f"set {name} to true, or remove the weights if they were not trained",
            )
        claims[name] = present or bool(claims[name])
    if claims["norm_before_fc"] and claims["fc_norm"]:
        source.findings.error(
            "draft", "draft-flags-disagree", "norm_before_fc and fc_norm exclude one another"
        )
    if norm_output is not None:
        claims["norm_output"] = norm_output
    elif claims["norm_output"] and source.format == "specforge":
        source.findings.warn(
            "draft",
            "norm-output-ambiguous",
            "norm_output is true in a SpecForge file: drafts that it trained before September 2026 "
            "carry the flag and still feed back the state before the norm",
            "if only the first draft position is accepted, set draft_norm_output to false",
        )
    if claims["norm_before_residual"] is None and source.format == "speculators":
        source.findings.warn(
            "draft",
            "norm-before-residual-absent",
            "norm_before_residual is not in this speculators file: taken as false",
            "add it to config.json; drafts trained with that library's defaults need true",
        )
    return {name: bool(value) for name, value in claims.items()}


def _head_dim(source: DraftSource, hidden_size: int, *, num_heads: int, num_kv_heads: int) -> int:
    """Never hidden / heads where something better is known: drafts may have wider heads."""
    claimed = source.layer.optional_integer("head_dim")
    fallback = claimed or max(hidden_size // num_heads, 1)
    q_rows = source.size(f"{ATTENTION}.q_proj.weight")
    k_rows = source.size(f"{ATTENTION}.k_proj.weight")
    if q_rows is None or k_rows is None or q_rows == num_heads * fallback:
        return fallback
    stored = q_rows // num_heads
    if q_rows % num_heads or k_rows != stored * num_kv_heads:
        # No head size fits both: the coverage of shapes reports it, with the expected numbers.
        return fallback
    if claimed is not None:
        source.contradict("head_dim", claimed, f"the projections have heads of {stored}")
    return stored


def _qk_norm(source: DraftSource) -> bool:
    """Norms on q and k: stored, or (Qwen3 layers of speculators) implied by the type."""
    if source.has_weights:
        return f"{ATTENTION}.q_norm.weight" in source.stored
    return source.format == "speculators" and source.layer.text("model_type", "") == "qwen3"


def _sliding_window(source: DraftSource) -> int | None:
    """The window that the layer attends within; `layer_types` and `use_sliding_window` decide
    where they are given, as configs carry an unused `sliding_window`."""
    window = source.layer.optional_integer("sliding_window")
    layer_types = source.layer.data.get("layer_types")
    if isinstance(layer_types, list) and layer_types:
        return window if layer_types[0] == "sliding_attention" else None
    return window if source.layer.flag("use_sliding_window", window is not None) else None
