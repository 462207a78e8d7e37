"""A target's config.json and generation_config.json as a ModelConfig.

Defaults of absent keys are those of each family's configuration class in transformers 5.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

from eyas.models.config import ModelConfig
from eyas.models.config_file import (
    Fields,
    read_dtype,
    read_json,
    read_quantization,
    read_rope,
    shape_problems,
)
from eyas.models.findings import Findings
from eyas.models.mixture_config import ExpertsKind, read_experts, read_latent
from eyas.models.quant_config import read_quant
from eyas.models.vision_config import read_vision
from eyas.types import EyasError

MAX_LAYERS = 1000  # more is a damaged file, and would take minutes to build


@dataclasses.dataclass(frozen=True)
class Family:
    """What one family fixes, and its defaults for keys that a config.json leaves out.

    qkv_bias, o_bias: None where `attention_bias` decides. head_dim: None is hidden / heads.
    experts: how its mixture of experts is described. is_latent: latent attention. section: the
    part of config.json that describes the language model, where it is a wrapped one; prefix: what
    stands before the names of its modules. other_types: further values of model_type.
    """

    model_type: str
    max_positions: int
    num_kv_heads: int | None
    head_dim: int | None
    qkv_bias: bool | None
    o_bias: bool | None
    reads_mlp_bias: bool
    qk_norm: bool
    has_windows: bool
    eos_token_id: int | None
    bos_token_id: int | None
    experts: ExpertsKind | None = None
    is_latent: bool = False
    section: str | None = None
    prefix: str = ""
    other_types: tuple[str, ...] = ()


_DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    max_positions=4096,
    num_kv_heads=None,
    head_dim=None,
    qkv_bias=None,
    o_bias=None,
    reads_mlp_bias=False,
    qk_norm=False,
    has_windows=False,
    eos_token_id=1,
    bos_token_id=0,
    experts="deepseek_v3",
    is_latent=True,
    other_types=("kimi_k2",),
)
FAMILIES = {
    "DeepseekV2ForCausalLM": dataclasses.replace(
        _DEEPSEEK_V3,
        model_type="deepseek_v2",
        max_positions=2048,
        reads_mlp_bias=True,
        eos_token_id=2,
        bos_token_id=1,
        experts="deepseek_v2",
        other_types=(),
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK25ForConditionalGeneration": dataclasses.replace(
        _DEEPSEEK_V3,
        model_type="kimi_k25",
        section="text_config",
        prefix="language_model.",
        other_types=(),
    ),
    "LlamaForCausalLM": Family("llama", 2048, None, None, None, None, True, False, False, 2, 1),
    "Qwen2ForCausalLM": Family(
        "qwen2", 32768, 32, None, True, False, False, False, True, None, None
    ),
    "Qwen3ForCausalLM": Family("qwen3", 32768, 32, 128, None, None, False, True, True, None, None),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", 32768, 4, None, None, None, False, True, True, None, None, "qwen3_moe"
    ),
}
# What other code bases call the same architecture.
_OTHER_NAMES = {"Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration"}


def read_target_config(folder: str | Path) -> ModelConfig:
    """Read a target's shape from `folder`, which holds a config.json.

    Raises CheckError (an EyasError) with every key that is missing, wrong or not supported.
    """
    folder, findings = Path(folder), Findings()
    if not folder.is_dir():
        findings.error(
            "target",
            "target-not-found",
            f"{folder} is not a folder",
            "give the folder that holds the target's config.json and weights",
        )
        findings.raise_on_errors()
    try:
        data = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        generation_data = read_json(generation) if generation.exists() else {}
    except EyasError as error:
        findings.error("target", "config-unreadable", str(error))
        findings.raise_on_errors()
        raise AssertionError from None
    architecture = _architecture(data)
    if architecture not in FAMILIES:
        _report_unsupported(architecture, data, findings)
        findings.raise_on_errors()
    top = fields = Fields(data, where=str(folder / "config.json"), subject="target")
    section = FAMILIES[architecture].section
    if section is not None:
        where = f"{folder / 'config.json'}: {section}"
        fields = Fields(top.section(section), where=where, subject="target")
    extra = Fields(generation_data, where=str(generation), subject="target")
    config = _read_family(architecture, fields, extra, folder)
    config = _with_outer(config, fields, top, folder)
    if not fields.missing and not fields.problems:
        fields.problems += shape_problems(config)
    for one in dict.fromkeys((top, fields, extra)):
        one.report(findings)
    findings.raise_on_errors()
    return config


def position_limit(config: ModelConfig) -> int:
    """The longest sequence that the rotary embedding was made for, scaling included.

    `max_position_embeddings` is the default length; files that switch a scaling on often leave it
    at the length before scaling.
    """
    rope, limit = config.rope, config.max_position_embeddings
    if rope.factor is None:
        return limit
    if rope.kind in ("linear", "dynamic"):
        return int(limit * rope.factor)
    if rope.kind == "yarn" and rope.original_max_position_embeddings:
        return max(limit, int(rope.original_max_position_embeddings * rope.factor))
    return limit


def _architecture(data: dict[str, Any]) -> str:
    """The named architecture; a file without one is told by its model_type, as in transformers."""
    names = data.get("architectures")
    if isinstance(names, list) and names:
        return _OTHER_NAMES.get(str(names[0]), str(names[0]))
    by_type = {
        model_type: name
        for name, family in FAMILIES.items()
        for model_type in (family.model_type, *family.other_types)
    }
    model_type = str(data.get("model_type"))
    return by_type.get(model_type, model_type)


def _report_unsupported(architecture: str, data: dict[str, Any], findings: Findings) -> None:
    near = difflib.get_close_matches(architecture, FAMILIES, n=2)
    hint = f"the nearest supported names are {' and '.join(near)}" if near else ""
    if data.get("draft_vocab_size") is not None or "speculators_model_type" in data:
        hint = "this is a draft: give it as --draft, and its target as --model"
    findings.error(
        "target",
        "unsupported-architecture",
        f"the architecture {architecture!r} is not supported; "
        f"supported are {', '.join(sorted(FAMILIES))}",
        hint,
    )


def _with_outer(config: ModelConfig, fields: Fields, top: Fields, folder: Path) -> ModelConfig:
    """What may stand beside a wrapped model's section instead of in it, and how quantized weights
    are stored, which depends on all the rest."""
    sections = [fields] if fields is top else [fields, top]
    methods = [read_quantization(one, folder) for one in sections]
    method = next(filter(None, methods), None)
    quant = None
    if method is not None and not fields.missing and not fields.problems:
        found = [one.section("quantization_config") for one in sections]
        section: dict[str, Any] = next(filter(None, found), {})
        prefix = FAMILIES[config.architecture].prefix
        quant = read_quant(section, config, prefix=prefix)
    vision = None
    if fields is not top:
        vision = read_vision(top, folder, vocab_size=config.vocab_size)
    return dataclasses.replace(
        config,
        quantization=method,
        quant=quant,
        dtype=config.dtype or read_dtype(top),
        vision=vision,
    )


def _read_family(architecture: str, fields: Fields, extra: Fields, folder: Path) -> ModelConfig:
    family = FAMILIES[architecture]
    max_positions = fields.integer("max_position_embeddings", family.max_positions)
    attention_bias = fields.flag("attention_bias", False)
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    o_bias = attention_bias if family.o_bias is None else family.o_bias
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.problems.append(f"hidden_act must be silu, not {activation!r}")
    eos = fields.token_ids("eos_token_id")
    if "eos_token_id" not in fields.data and family.eos_token_id is not None:
        eos = (family.eos_token_id,)
    experts = None
    if family.experts is not None:
        experts = read_experts(fields, family.experts, num_layers=num_layers)
    return ModelConfig(
        architecture=architecture,
        model_type=fields.text("model_type", family.model_type),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        **_read_heads(family, fields),
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields, max_positions=max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=fields.flag("mlp_bias", False) and family.reads_mlp_bias,
        qk_norm=family.qk_norm,
        dtype=read_dtype(fields),
        eos_token_ids=tuple(dict.fromkeys(eos + extra.token_ids("eos_token_id"))),
        bos_token_id=_bos(fields, family),
        sliding_window=_sliding_window(fields, num_layers) if family.has_windows else None,
        experts=experts,
        num_mtp_layers=fields.integer("num_nextn_predict_layers", 1, least=0)
        if family.is_latent
        else 0,
    )


def _read_heads(family: Family, fields: Fields) -> dict[str, Any]:
    """num_heads, num_kv_heads, head_dim, latent."""
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if family.is_latent:
        latent = read_latent(fields, always_interleaved=family.experts == "deepseek_v2")
        return {
            "num_heads": num_heads,
            "num_kv_heads": 1,
            "head_dim": latent.rope_head_dim,
            "latent": latent,
        }
    # Absent is the family's default; null is "as many as heads".
    num_kv_heads = fields.optional_integer("num_key_value_heads")
    if "num_key_value_heads" not in fields.data:
        num_kv_heads = family.num_kv_heads
    head_dim = fields.optional_integer("head_dim") or family.head_dim
    if head_dim is None and hidden_size % num_heads:
        fields.problems.append(
            f"hidden_size {hidden_size} is no multiple of the {num_heads} heads; add head_dim"
        )
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads or num_heads,
        "head_dim": head_dim or max(hidden_size // num_heads, 1),
    }


def _bos(fields: Fields, family: Family) -> int | None:
    if "bos_token_id" not in fields.data:
        return family.bos_token_id
    ids = fields.token_ids("bos_token_id")
    return ids[0] if ids else None


def _sliding_window(fields: Fields, num_layers: int) -> int | None:
    """The window of the layers that have one, None when every layer sees everything (Qwen)."""
    window = fields.optional_integer("sliding_window") or 4096
    layer_types = fields.data.get("layer_types")
    if isinstance(layer_types, list):
        return window if "sliding_attention" in layer_types else None
    if not fields.flag("use_sliding_window", False):
        return None
    first = fields.integer("max_window_layers", 28, least=0)
    return window if first < num_layers else None
