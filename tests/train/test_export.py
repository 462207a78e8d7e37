"""A trained draft as files: what other engines ask of them, and the way back into this one."""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import training
from fixtures.tiny import llama_config
from fixtures.training import load_served, random_talks, shake, target_in, trainer_logits
from safetensors.torch import load_file

from eyas.models.config import RopeConfig
from eyas.models.draft_config import read_draft_config
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.llama import LlamaForCausalLM
from eyas.train.draft import build_draft, choose_boundaries, design_draft
from eyas.train.export import ExportFormat, export_draft, layer_ids
from eyas.train.packing import Corpus
from eyas.train.processes import Processes
from eyas.train.trainer import Trainer
from eyas.types import EyasError

KEPT = torch.arange(0, 64, 2)
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True, "norm_output": True, "fc_bias": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
}


def make(dtype: torch.dtype, **flags: Any) -> tuple[LlamaForCausalLM, Eagle3Draft]:
    """An eight-layer target and a draft for it, no weight at its first value."""
    target_config = llama_config(num_layers=8, eos_token_ids=(2,), bos_token_id=1)
    target = target_in(dtype, target_config)
    config = dataclasses.replace(design_draft(target.config, len(KEPT)), **flags)
    draft = build_draft(target, config, KEPT, seed=2)
    shake(draft, scale=0.1)
    return target, draft


def write(
    target: LlamaForCausalLM, draft: Eagle3Draft, folder: Path, dtype: torch.dtype, **options: Any
) -> dict[str, Any]:
    export_draft(
        draft,
        folder,
        num_target_layers=target.num_layers,
        target_vocab_size=target.vocab_size,
        dtype=dtype,
        **options,
    )
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def header(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """(dtype, shape) of each tensor, as any engine reads it."""
    with (folder / "model.safetensors").open("rb") as file:
        data = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    data.pop("__metadata__")
    return {name: (entry["dtype"], entry["shape"]) for name, entry in data.items()}


def test_layout_of_specforge(tmp_path: Path) -> None:
    """Names, shapes and dtypes of the published layout: all of them and no other."""
    target, draft = make(torch.float32)
    write(target, draft, tmp_path, torch.bfloat16)
    h, q, kv, i, vd, vt = 32, 48, 24, 48, 32, 64
    layer = "midlayer"
    bf16 = {
        "fc.weight": [h, 3 * h],
        f"{layer}.self_attn.q_proj.weight": [q, 2 * h],
        f"{layer}.self_attn.k_proj.weight": [kv, 2 * h],
        f"{layer}.self_attn.v_proj.weight": [kv, 2 * h],
        f"{layer}.self_attn.o_proj.weight": [h, q],
        f"{layer}.mlp.gate_proj.weight": [i, h],
        f"{layer}.mlp.up_proj.weight": [i, h],
        f"{layer}.mlp.down_proj.weight": [h, i],
        f"{layer}.input_layernorm.weight": [h],
        f"{layer}.hidden_norm.weight": [h],
        f"{layer}.post_attention_layernorm.weight": [h],
        "norm.weight": [h],
        "lm_head.weight": [vd, h],
    }
    expected = {name: ("BF16", shape) for name, shape in bf16.items()}
    expected |= {"d2t": ("I64", [vd]), "t2d": ("BOOL", [vt])}
    assert header(tmp_path) == expected


def test_config_of_specforge(tmp_path: Path) -> None:
    """What SGLang's and vLLM's loaders of LlamaForCausalLMEagle3 read."""
    target, draft = make(torch.float32)
    config = write(target, draft, tmp_path, torch.bfloat16)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 1
    assert (config["vocab_size"], config["draft_vocab_size"]) == (64, 32)
    assert config["tie_word_embeddings"] is False and config["attention_bias"] is False
    assert config["torch_dtype"] == "bfloat16" and config["head_dim"] == 12
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    # Both engines add 1 to these, or take the default: boundaries 2, n // 2 and n - 3.
    eagle = config["eagle_config"]
    assert eagle == {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
    }
    assert draft.boundaries == (2, 4, 5)
    # Flags that are off are not there: older engines know none of them.
    assert not {"norm_output", "fc_norm", "norm_before_fc", "norm_before_residual"} & set(config)


def test_maps(tmp_path: Path) -> None:
    target, draft = make(torch.float32)
    write(target, draft, tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    modes = {(tmp_path / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1  # who may read the one may read the other
    assert torch.equal(torch.arange(32) + tensors["d2t"], KEPT)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), KEPT)


@pytest.mark.parametrize("format", ["specforge", "speculators"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_reload_equals_the_trainer(
    flags: dict[str, Any], format: ExportFormat, tmp_path: Path
) -> None:
    """Config, weights and logits survive; in bfloat16, a bfloat16 trainer's exactly."""
    if format == "speculators":
        flags = {name: value for name, value in flags.items() if name != "fc_bias"}
    for dtype in (torch.float32, torch.bfloat16):
        target, draft = make(dtype, **flags)
        write(target, draft, tmp_path, dtype, format=format)
        again = load_served(tmp_path, target, dtype)
        same = ("boundaries", "draft_vocab_size", "norm_before_residual", "norm_before_fc")
        for name in (*same, "fc_norm", "norm_output", "fc_bias", "target_hidden_size"):
            assert getattr(again.config, name) == getattr(draft.config, name), name
        talks = random_talks(2)
        expected = trainer_logits(target, draft, talks, num_steps=3)
        assert torch.equal(trainer_logits(target, again, talks, num_steps=3), expected)


def test_layout_of_speculators(tmp_path: Path) -> None:
    target, draft = make(torch.float32)
    config = write(
        target, draft, tmp_path, torch.bfloat16, format="speculators", target_name="me/target"
    )
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["norm_before_residual"] is False
    assert config["speculators_config"]["verifier"]["name_or_path"] == "me/target"
    stored = header(tmp_path)
    assert stored["embed_tokens.weight"] == ("BF16", [64, 32])
    assert "layers.0.hidden_norm.weight" in stored
    assert not any(name.startswith("midlayer.") for name in stored)


ROPES = {
    "plain": RopeConfig(theta=123456.0),
    "linear": RopeConfig(kind="linear", factor=2.0),
    "llama3": RopeConfig(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "yarn, partial": RopeConfig(
        kind="yarn",
        partial=0.5,
        factor=4.0,
        original_max_position_embeddings=64,
        mscale=1.0,
        mscale_all_dim=0.7,
    ),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rope_survives(rope: RopeConfig, tmp_path: Path) -> None:
    config = llama_config(num_layers=8, rope=rope, max_position_embeddings=8192)
    target = target_in(torch.float32, config)
    draft = build_draft(target, design_draft(config, len(KEPT)), KEPT, seed=0)
    for format in ("specforge", "speculators"):
        write(target, draft, tmp_path / format, torch.float32, format=format)
        assert read_draft_config(tmp_path / format, config).decoder.rope == rope


@pytest.mark.parametrize("num_layers", range(1, 40))
def test_boundaries_of_any_depth(num_layers: int) -> None:
    """Distinct and ascending in a target of any depth, and readable from both layouts."""
    boundaries = choose_boundaries(num_layers)
    assert len(boundaries) == min(num_layers, 3)
    assert list(boundaries) == sorted(set(boundaries)) and 0 < boundaries[0]
    assert boundaries[-1] <= num_layers
    for format in ("specforge", "speculators"):
        layer_ids(boundaries, num_target_layers=num_layers, format=format)  # type: ignore[arg-type]


def test_boundaries_that_would_be_misread_are_refused() -> None:
    """Their ids are those of the default boundaries, which loaders take as they are."""
    with pytest.raises(EyasError, match=r"would read \[2, 4, 5\]"):
        layer_ids((3, 5, 6), num_target_layers=8, format="specforge")
    with pytest.raises(EyasError, match="speculators"):
        layer_ids((1, 3, 4), num_target_layers=8, format="speculators")
    with pytest.raises(EyasError, match="cannot be written"):
        layer_ids((0, 3, 6), num_target_layers=8, format="specforge")
    assert layer_ids((0, 3, 6), num_target_layers=8, format="speculators") == [0, 3, 6]
    assert layer_ids((2, 4, 8), num_target_layers=8, format="specforge") == [1, 3, 7]


def test_master_weights_reach_the_files(tmp_path: Path) -> None:
    """What is exported after a step is what the optimizer holds, rounded."""
    target, draft = make(torch.float32)
    corpus = Corpus.read(random_talks(3), max_length=64)
    options = training.settings(num_steps=1)
    trainer = Trainer(target, draft, corpus, settings=options, processes=Processes())
    _, plan = next(trainer.plans(0))
    trainer.run_step(1, plan)
    write(target, draft, tmp_path, torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    views = trainer.master.views(trainer.master.flat)
    assert torch.equal(stored["lm_head.weight"], views["lm_head.weight"].bfloat16())
    qkv = torch.cat([stored[f"midlayer.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(qkv, views["layers.0.self_attn.qkv_proj.weight"].bfloat16())
