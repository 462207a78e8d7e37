"""Writing a trained draft as files that engines load: SpecForge's layout, or speculators'.

SpecForge: `midlayer.*` names, `LlamaForCausalLMEagle3`, layer ids as "output of layer i" (boundary
- 1), no embedding. speculators: `layers.0.*` names, `Eagle3DraftModel`, layer ids as boundaries,
with the embedding.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.models.boundaries import translate_layer_ids
from eyas.models.config import DraftConfig, RopeConfig
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.loader import weight_slots
from eyas.train.vocabulary import vocabulary_maps
from eyas.types import EyasError

ExportFormat = Literal["specforge", "speculators"]

_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def export_draft(
    draft: Eagle3Draft,
    folder: Path,
    *,
    num_target_layers: int,
    target_vocab_size: int,
    format: ExportFormat = "specforge",
    dtype: torch.dtype = torch.bfloat16,
    target_name: str = "",
) -> None:
    """Write config.json and model.safetensors into `folder` (made if need be).

    dtype: of the stored weights; maps stay int64 and bool. target_name: noted in speculators'
    config. Raises EyasError when the draft's boundaries cannot be written so that engines read
    the same ones back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {name: _spell(name, format) for name in weight_slots(draft)}
    tensors = {
        names[name]: tensor.to(dtype).contiguous().cpu()
        for name, tensor in draft_tensors(draft).items()
        if format == "speculators" or not name.startswith("embed_tokens.")
    }
    tensors["d2t"], tensors["t2d"] = vocabulary_maps(draft.target_ids_V.cpu(), target_vocab_size)
    config = draft_config_json(
        draft.config,
        num_target_layers=num_target_layers,
        format=format,
        dtype=dtype,
        target_name=target_name,
    )
    # An unfinished config would be taken for a draft: it is written last, and at once.
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    unfinished = folder / ".config.json"
    unfinished.write_text(json.dumps(config, indent=2) + "\n")
    # safetensors makes a file that only its owner can read; the server may be another user.
    weights.chmod(unfinished.stat().st_mode)
    unfinished.rename(folder / "config.json")


def draft_tensors(draft: Eagle3Draft) -> dict[str, Tensor]:
    """Float weights by canonical name, merged projections taken apart; they share memory."""
    tensors = {}
    for name, slot in weight_slots(draft).items():
        owner, _, attribute = slot.path.rpartition(".")
        whole = getattr(draft.get_submodule(owner), attribute).detach()
        if whole.is_floating_point():
            tensors[name] = whole[slot.start : slot.start + slot.shape[0]]
    return tensors


def _spell(name: str, format: ExportFormat) -> str:
    if format == "specforge" and name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return name


def layer_ids(
    boundaries: tuple[int, ...], *, num_target_layers: int, format: ExportFormat
) -> list[int]:
    """Boundaries as the format's layer ids. Raises EyasError when reading them back by the common
    rules would give others."""
    ids = [b - 1 for b in boundaries] if format == "specforge" else list(boundaries)
    read = translate_layer_ids(ids, num_layers=num_target_layers, format=format)
    if min(ids) < 0 or read.boundaries != boundaries:
        raise EyasError(
            f"boundaries {list(boundaries)} of a target of {num_target_layers} layers cannot be "
            f"written in {format}'s layout: engines would read {list(read.boundaries)}; choose "
            "other boundaries or the other layout"
        )
    return ids


def draft_config_json(
    config: DraftConfig,
    *,
    num_target_layers: int,
    format: ExportFormat,
    dtype: torch.dtype,
    target_name: str = "",
) -> dict[str, Any]:
    """config.json of a draft. Raises EyasError for one that the layout cannot describe."""
    if config.decoder.latent is not None or config.decoder.qk_norm:
        raise EyasError(
            "only drafts with a plain Llama layer are trained and exported, not ones with latent "
            "attention or norms on q and k"
        )
    ids = layer_ids(config.boundaries, num_target_layers=num_target_layers, format=format)
    layer = _layer_fields(config)
    top: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if format == "speculators":
        if config.fc_bias:
            raise EyasError("speculators' layout has no place for an fc bias")
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": 3,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target_name or None, "architectures": []},
            },
            "transformer_layer_config": {"model_type": "llama", **layer},
            **top,
            **{flag: getattr(config, flag) for flag in _FLAGS},
            _IDS: ids,
            "embed_requires_grad": False,
        }
    # Flags that are off are left out: not every engine knows them.
    flags = {flag: True for flag in _FLAGS if getattr(config, flag)}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer,
        **top,
        **flags,
        **({"bias": True} if config.fc_bias else {}),
        "eagle_config": {_IDS: ids, "use_aux_hidden_state": True},
    }


def _layer_fields(config: DraftConfig) -> dict[str, Any]:
    decoder = config.decoder
    eos = decoder.eos_token_ids
    return {
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": decoder.rms_norm_eps,
        **rope_fields(decoder.rope),
        "max_position_embeddings": decoder.max_position_embeddings,
        "vocab_size": decoder.vocab_size,
        "attention_bias": decoder.qkv_bias,
        "mlp_bias": decoder.mlp_bias,
        "bos_token_id": decoder.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
    }


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """A rotary embedding in the keys of transformers 4, which every engine reads."""
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.partial != 1.0:
        fields["partial_rotary_factor"] = rope.partial
    if rope.kind != "default":
        own = {"theta", "kind", "partial"}
        values = {k: v for k, v in dataclasses.asdict(rope).items() if k not in own}
        scaling = {key: value for key, value in values.items() if value is not None}
        fields["rope_scaling"] = {"rope_type": rope.kind, **scaling}
    return fields
