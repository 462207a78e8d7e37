"""The decoder layer and the norm flags of a draft, from its claims and its tensors."""

from __future__ import annotations

from eyas.models.config import ModelConfig
from eyas.models.config_file import read_dtype, read_quantization, read_rope
from eyas.models.draft_flags import read_flag
from eyas.models.draft_kind import architecture_of
from eyas.models.draft_source import DraftSource

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
    qkv_biases = [f"{ATTENTION}.{part}_proj.bias" for part in "qkv"]
    mlp_biases = [f"{MLP}.{part}_proj.bias" for part in ("gate", "up", "down")]
    hidden_size = layer.integer("hidden_size")
    attention_bias, mlp_bias = layer.flag("attention_bias", False), layer.flag("mlp_bias", False)
    qkv_bias = source.has(*qkv_biases, claimed=attention_bias, key="attention_bias")
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
        head_dim=_head_dim(source, hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads),
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
    )


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
