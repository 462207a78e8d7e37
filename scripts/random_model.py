"""A random Llama of two layers with SmolLM2's widths and tokenizer, for measurements of a server.

Its answers are noise; what it costs is what two of the real model's thirty layers cost.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from eyas.models.embedded import resolve_model


def write_random_model(folder: Path, *, num_layers: int = 2) -> Path:
    """Write a checkpoint folder; returns it."""
    source = resolve_model("smollm2-135m")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    config |= {"torch_dtype": "float32", "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    head = hidden // config["num_attention_heads"]
    num_kv = config["num_key_value_heads"] * head
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.05

    tensors = {"model.embed_tokens.weight": random(vocab, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        rows = {"q": hidden, "k": num_kv, "v": num_kv, "o": hidden}
        for name, num_rows in rows.items():
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = random(num_rows, hidden)
        for name in ("gate", "up"):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = random(inner, hidden)
        tensors[f"{prefix}.mlp.down_proj.weight"] = random(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden)
    save_file(tensors, folder / "model.safetensors")
    return folder
