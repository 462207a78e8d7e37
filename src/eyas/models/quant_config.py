"""Quantized storage from a config.json: which formats are read as stored, and in which layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from eyas.models.config import ModelConfig, QuantConfig, QuantizedPart

Ignored = Callable[[str], bool]


def read_quant(
    section: Mapping[str, Any], model: ModelConfig, *, prefix: str
) -> QuantConfig | None:
    """How the weights of `model` are stored; None for a format that is not supported.

    section: the quantization_config. prefix: what stands before the names of a wrapped model.
    """
    method = section.get("quant_method")
    scheme: tuple[str, int, Ignored] | None = None
    if method == "compressed-tensors":
        scheme = _compressed_tensors(section)
    elif method == "fp8":
        scheme = _fp8(section)
    if scheme is None:
        return None
    name, group_size, is_ignored = scheme

    def ignored(module: str) -> bool:
        return is_ignored(module) or is_ignored(prefix + module)

    if method == "compressed-tensors" and not model.tie_word_embeddings and not ignored("lm_head"):
        return None  # a quantized head
    parts: set[QuantizedPart] = set()
    for part in get_args(QuantizedPart):
        states = {not ignored(module) for module in _modules(model, part)}
        if len(states) == 2:
            return None  # a part of the layers only
        if states == {True}:
            parts.add(part)
    if name == "int4":
        return QuantConfig(scheme="int4", group_size=group_size, parts=frozenset(parts))
    return QuantConfig(scheme="fp8", group_size=group_size, parts=frozenset(parts))


def plain(model: ModelConfig) -> ModelConfig:
    """The same model with weights that are stored as they are."""
    return dataclasses.replace(model, quant=None)


def _modules(model: ModelConfig, part: QuantizedPart) -> Iterator[str]:
    """Names of the linear layers of a part; of the experts the first and the last."""
    experts, latent = model.experts, model.latent
    with_experts = experts.layers if experts is not None else ()
    mlp = ("gate_proj", "up_proj", "down_proj")
    for layer in range(model.num_layers):
        where = f"model.layers.{layer}"
        if part == "attention":
            names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
            if latent is not None:
                query = ("q_a_proj", "q_b_proj") if latent.q_lora_rank else ("q_proj",)
                names = (*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
            yield from (f"{where}.self_attn.{name}" for name in names)
        elif part == "mlp" and layer not in with_experts:
            yield from (f"{where}.mlp.{name}" for name in mlp)
        elif experts is None or layer not in with_experts:
            continue
        elif part == "shared_experts" and experts.shared_size:
            yield from (f"{where}.mlp.shared_experts.{name}" for name in mlp)
        elif part == "experts":
            for expert in (0, experts.num_experts - 1):
                yield from (f"{where}.mlp.experts.{expert}.{name}" for name in mlp)


def _compressed_tensors(section: Mapping[str, Any]) -> tuple[str, int, Ignored] | None:
    """Signed 4-bit integers in groups along the inputs, weights alone."""
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or section.get("kv_cache_scheme"):
        return None
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("targets") != ["Linear"]:
        return None
    wanted = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    formats = (section.get("format"), group.get("format") or section.get("format"))
    size, patterns = weights.get("group_size"), _names(section, "ignore")
    if (
        patterns is None
        or any(weights.get(key) != value for key, value in wanted.items())
        or any(name != "pack-quantized" for name in formats)
        or weights.get("actorder") not in (None, False)
        or group.get("input_activations")
        or group.get("output_activations")
        or type(size) is not int
        or size < 1
    ):
        return None
    try:
        # A plain name is the whole of a module's, a pattern its beginning.
        ignored = [
            re.compile(name[3:] if name.startswith("re:") else rf"{re.escape(name)}\Z")
            for name in patterns
        ]
    except re.error:
        return None
    return "int4", size, lambda name: any(pattern.match(name) for pattern in ignored)


def _names(section: Mapping[str, Any], key: str) -> list[str] | None:
    """A list of names, empty where the key is absent; None for anything else."""
    names = section.get(key) or []
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if is_list else None


def _fp8(section: Mapping[str, Any]) -> tuple[str, int, Ignored] | None:
    """e4m3 in squares; activations stay as they are here."""
    block = section.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or block[0] != block[1]:
        return None
    if type(block[0]) is not int or block[0] < 1 or section.get("fmt", "e4m3") != "e4m3":
        return None
    left_out = _names(section, "modules_to_not_convert")
    if left_out is None:
        return None
    return "fp8", block[0], lambda name: any(f".{m}." in f".{name}." for m in left_out)
