"""Shapes to benchmark without any weights: public ones by name, others by their config.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from eyas.config import ConfigError, EngineConfig
from eyas.models.boundaries import default_boundaries
from eyas.models.config import ModelConfig
from eyas.models.target_config import read_target_config
from eyas.types import EyasError

RANDOM_DRAFT = "random"
DRAFT_VOCAB_SIZE = 32_000
DEFAULT_ACCEPTANCE = 3.0

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The sizes that the models' own config.json have; "tiny" is for trying the benchmark out.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0},
    },
    "llama-3.2-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "tiny": _LLAMA
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def with_draft_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an engine for a shape, with what is not given: a random draft and, where it
    drafts, the simulated acceptance (3 tokens a round, or half of a short chain).

    Raises ConfigError for a draft that is neither.
    """
    found = {"draft": RANDOM_DRAFT} | settings
    if found["draft"] not in (RANDOM_DRAFT, "none"):
        raise ConfigError(
            "--shape makes its own draft: leave --draft out, or write --draft none for plain "
            "decoding alone"
        )
    depth = found.get("num_speculative_tokens", 3)
    if found["draft"] != "none" and depth > 0 and "simulate_acceptance" not in found:
        length = DEFAULT_ACCEPTANCE if depth > 2 else 1 + depth / 2
        found["simulate_acceptance"] = (length,)
    return found


def write_shape(config: EngineConfig, folder: Path) -> EngineConfig:
    """Write config.json of target and draft into `folder`; returns the settings that name them.

    The draft is one Llama layer of the target's width with the boundaries that EAGLE-3 reads by
    default. Raises EyasError for a shape that is not known and a config.json that cannot be read.
    """
    target_folder = folder / "target"
    target_folder.mkdir(parents=True)
    (target_folder / "config.json").write_text(_target_json(config.model))
    target = read_target_config(target_folder)
    if target.experts is not None or target.quantization is not None:
        raise EyasError(
            f"{config.model} has experts or quantized weights: what its rounds must read depends "
            "on more than its shape; take a dense model in plain weights"
        )
    if config.draft_name is None:
        return dataclasses.replace(config, model=str(target_folder), draft=None)
    if target.num_layers < 2 or target.latent is not None:
        raise EyasError(
            f"{config.model} has no draft of this kind (it needs two layers and grouped-query "
            "attention): add --draft none"
        )
    draft_folder = folder / "draft"
    draft_folder.mkdir()
    (draft_folder / "config.json").write_text(json.dumps(draft_json(target)))
    return dataclasses.replace(
        config,
        model=str(target_folder),
        draft=str(draft_folder),
        draft_boundaries=config.draft_boundaries or boundaries_of(target.num_layers),
    )


def boundaries_of(num_layers: int) -> tuple[int, ...]:
    """What EAGLE-3 reads by default; of a shallow target its ends and middle."""
    return (0, num_layers // 2, num_layers) if num_layers < 8 else default_boundaries(num_layers)


def draft_json(target: ModelConfig) -> dict[str, Any]:
    """config.json of the random draft for a target."""
    return _LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(DRAFT_VOCAB_SIZE, target.vocab_size),
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": target.dtype or "bfloat16",
    }


def _target_json(name: str) -> str:
    if name in SHAPES:
        return json.dumps(SHAPES[name])
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json":
        known = ", ".join(SHAPES)
        raise EyasError(
            f"--shape {name} is not known: use one of {known}, or the path of a config.json"
        )
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise EyasError(f"--shape {name} cannot be read: {error}") from None
