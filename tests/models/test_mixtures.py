"""Targets with latent attention and experts against transformers, from files to logits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.mixtures import (
    FAMILIES,
    NUM_TOKENS,
    VOCAB,
    run_paged,
    run_reference,
    write_reference,
)
from fixtures.tiny import random_prompts
from safetensors.torch import load_file, save_file

from eyas.models.checkpoint import Checkpoint
from eyas.models.kimi_k25 import KimiK25ForConditionalGeneration, published_name
from eyas.models.loader import load_weights, weight_slots
from eyas.models.registry import target_class
from eyas.models.target_config import read_target_config
from eyas.types import EyasError

TOKENS = random_prompts([NUM_TOKENS], vocab_size=VOCAB)[0]


def load_target(folder: Path) -> Any:
    config = read_target_config(folder)
    model: Any = target_class(config.architecture)(
        config, dtype=torch.float32, device="cpu", max_model_len=NUM_TOKENS
    )
    load_weights(model, Checkpoint.open(folder))
    model.set_eagle3_layers_to_capture(range(model.num_layers + 1))
    return model


@pytest.mark.parametrize("name", list(FAMILIES))
def test_equals_transformers(tmp_path: Path, name: str) -> None:
    logits_TV, boundaries = run_reference(write_reference(tmp_path, name), TOKENS)
    model = load_target(tmp_path)
    for chunk in (70, 7):
        ours_TV, features_TF = run_paged(model, TOKENS, chunk=chunk)
        torch.testing.assert_close(ours_TV, logits_TV, atol=1e-4, rtol=0)
        captured = features_TF.split(model.hidden_size, dim=1)
        for ours, theirs in zip(captured, boundaries, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; `...` removes one."""
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2", "kimi_k25"])
@pytest.mark.parametrize("is_named", [True, False])
def test_one_model_under_every_type(tmp_path: Path, model_type: str, is_named: bool) -> None:
    logits_TV, _ = run_reference(write_reference(tmp_path, "kimi-k2"), TOKENS)
    if model_type == "kimi_k25":
        wrap(tmp_path)
    names = {} if is_named else {"architectures": ...}
    edit_config(tmp_path, model_type=model_type, **names)
    ours_TV, _ = run_paged(load_target(tmp_path), TOKENS)
    torch.testing.assert_close(ours_TV, logits_TV, atol=1e-4, rtol=0)


IN_MEMORY = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "mm_projector.": "model.mm_projector.",
}


def wrap(folder: Path, *, in_memory: bool = False) -> None:
    """Make a checkpoint of the language model one of Kimi-K2.5, with some vision weights.

    in_memory: with the names of transformers' module tree instead of the published ones.
    """
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(4, 3, 2, 2)
    tensors["vision_tower.encoder.blocks.0.wqkv.weight"] = torch.ones(12, 4)
    tensors["mm_projector.proj.0.weight"] = torch.ones(4, 4)
    if in_memory:
        for published, other in IN_MEMORY.items():
            tensors = {
                other + n.removeprefix(published) if n.startswith(published) else n: tensor
                for n, tensor in tensors.items()
            }
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    data = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "tie_word_embeddings": True,  # of the wrapper, as transformers' default has it
        "dtype": text.pop("dtype"),
        "text_config": text,
        "vision_config": None,  # so that images are not served
    }
    (folder / "config.json").write_text(json.dumps(data))


@pytest.mark.parametrize("in_memory", [False, True])
def test_kimi_k25_reads_its_language_model(tmp_path: Path, in_memory: bool) -> None:
    logits_TV, _ = run_reference(write_reference(tmp_path, "kimi-k2"), TOKENS)
    wrap(tmp_path, in_memory=in_memory)
    model = load_target(tmp_path)
    assert isinstance(model, KimiK25ForConditionalGeneration)
    assert model.language_model.config.dtype == "float32"
    ours_TV, _ = run_paged(model, TOKENS)
    torch.testing.assert_close(ours_TV, logits_TV, atol=1e-4, rtol=0)


def test_weights_that_are_neither_text_nor_vision_are_refused(tmp_path: Path) -> None:
    write_reference(tmp_path, "kimi-k2")
    wrap(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"audio_tower.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(EyasError, match="1 left over: audio_tower.weight"):
        load_target(tmp_path)


@pytest.mark.parametrize("name", ["kimi-k2", "v3"])
def test_prediction_layers_behind_the_last_one_are_not_read(tmp_path: Path, name: str) -> None:
    logits_TV, _ = run_reference(write_reference(tmp_path, name), TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(32, 64)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    ours_TV, _ = run_paged(load_target(tmp_path), TOKENS)
    torch.testing.assert_close(ours_TV, logits_TV, atol=1e-4, rtol=0)
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(EyasError, match="left over"):
        load_target(tmp_path)


def test_published_names_are_kept() -> None:
    for name in (*IN_MEMORY, "language_model.model.layers.0.mlp.experts.3.up_proj.weight_packed"):
        assert published_name(name) == name
    assert published_name("model.language_model.model.norm.weight") == (
        "language_model.model.norm.weight"
    )
    for published, other in IN_MEMORY.items():
        assert published_name(f"{other}x") == f"{published}x"


def test_every_stored_expert_has_its_place(tmp_path: Path) -> None:
    write_reference(tmp_path, "v3")
    model, stored = load_target(tmp_path), load_file(tmp_path / "model.safetensors")
    slots = weight_slots(model)
    assert set(slots) == set(stored)
    experts = model.model.layers[1].mlp.experts
    for index in (0, 7):
        where = f"model.layers.1.mlp.experts.{index}"
        parts = [stored[f"{where}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(experts.gate_up_proj.weight[index], torch.cat(parts))
        down = stored[f"{where}.down_proj.weight"]
        assert torch.equal(experts.down_proj.weight[index], down)
    missing = dict(stored)
    del missing["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(missing, tmp_path / "model.safetensors")
    with pytest.raises(EyasError, match=r"1 missing: model\.layers\.2\.mlp\.experts\.5\.up_proj"):
        load_target(tmp_path)


WRONG = {
    "v2-groups": {"norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "v3": {"topk_group": 5, "scoring_func": "softmax", "num_experts_per_tok": 9},
    "qwen3-moe": {"mlp_only_layers": [0.5], "num_experts_per_tok": 9},
}


@pytest.mark.parametrize("name", list(WRONG))
def test_routing_that_is_not_computed_is_refused(tmp_path: Path, name: str) -> None:
    write_reference(tmp_path, name)
    for key, value in WRONG[name].items():
        before = (tmp_path / "config.json").read_text()
        edit_config(tmp_path, **{key: value})
        with pytest.raises(EyasError):
            read_target_config(tmp_path)
        (tmp_path / "config.json").write_text(before)


def test_layers_with_experts() -> None:
    """By first_k_dense_replace and moe_layer_freq, as DeepSeek's own code has it."""
    from eyas.models.config_file import Fields
    from eyas.models.mixture_config import read_experts

    def layers(**data: Any) -> tuple[int, ...]:
        fields = Fields(data, where="", subject="target")
        experts = read_experts(fields, "deepseek_v3", num_layers=8)
        assert not fields.problems
        return () if experts is None else experts.layers

    assert layers() == (3, 4, 5, 6, 7)
    assert layers(first_k_dense_replace=1, moe_layer_freq=2) == (2, 4, 6)
    assert layers(first_k_dense_replace=0) == tuple(range(8))
    assert layers(first_k_dense_replace=8) == ()


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    """A config.json with the required keys alone gives what the configuration classes give."""
    for name, keys in {"v2-lite": ("num_experts_per_tok",), "v3": (), "qwen3-moe": ()}.items():
        model_class, config_class, _ = FAMILIES[name]
        required = {
            "architectures": [model_class.__name__],
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": 64,
            **dict.fromkeys(keys, 2),
        }
        (tmp_path / "config.json").write_text(json.dumps(required))
        ours = read_target_config(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config_class(**required).to_dict()))
        assert dataclasses.replace(read_target_config(tmp_path), model_type="") == (
            dataclasses.replace(ours, model_type="")
        )
