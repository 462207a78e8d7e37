"""INT4 and FP8 checkpoints in their published layouts, read as stored, against the weights that
they stand for."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import TargetShape, target_tensors, write_target
from fixtures.mixtures import NUM_TOKENS, VOCAB, run_paged, run_reference, write_reference
from fixtures.quantized import EXPERT, INT4_TAG, LINEAR, fp8, fp8_tag, int4, quantize
from fixtures.tiny import full_forward, random_prompts
from safetensors.torch import load_file, save_file

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import QuantConfig
from eyas.models.loader import load_weights
from eyas.models.quantization import StoredWeight, unpack_int4
from eyas.models.registry import target_class
from eyas.models.target_config import read_target_config
from eyas.types import EyasError

TOKENS = random_prompts([NUM_TOKENS], vocab_size=VOCAB)[0]
# The smallest sizes with several groups of 32.
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}


def load_target(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = read_target_config(folder)
    model: Any = target_class(config.architecture)(
        config, dtype=dtype, device="cpu", max_model_len=NUM_TOKENS
    )
    load_weights(model, Checkpoint.open(folder))
    model.set_eagle3_layers_to_capture((0,))
    return model


def stored_parts(config: Any) -> set[str]:
    assert config.quant is not None
    return set(config.quant.parts)


def test_int4_experts(tmp_path: Path) -> None:
    """As Kimi-K2.5 stores them: routed experts alone, groups of 32, bfloat16 scales."""
    hf = write_reference(tmp_path, "kimi-k2", **SIZES)
    meant = quantize(tmp_path, EXPERT, int4, INT4_TAG)
    model = load_target(tmp_path)
    assert stored_parts(model.config) == {"experts"}
    stack = model.model.layers[1].mlp.experts.gate_up_proj
    assert stack.weight_packed.dtype == torch.int32
    assert stack.weight_packed.shape == (8, 64, 8) and stack.weight_scale.shape == (8, 64, 2)
    assert not hasattr(stack, "weight")
    where = "model.layers.1.mlp.experts.5"
    both = [meant[f"{where}.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(stack.dense(torch.tensor([5]))[0], torch.cat(both))
    load_meant(hf, meant)
    logits_TV, _ = run_reference(hf, TOKENS)
    torch.testing.assert_close(run_paged(model, TOKENS)[0], logits_TV, atol=1e-4, rtol=0)


def load_meant(hf: Any, meant: dict[str, torch.Tensor]) -> None:
    """Put weights by checkpoint name into a model of transformers, whose experts are stacked."""
    tree = hf.state_dict()
    for name, tensor in tree.items():
        if name in meant:
            tensor.copy_(meant[name])
        elif name.endswith("experts.gate_up_proj"):
            for i, matrix in enumerate(tensor):
                where = name.removesuffix("gate_up_proj") + str(i)
                parts = [meant[f"{where}.{part}_proj.weight"] for part in ("gate", "up")]
                matrix.copy_(torch.cat(parts))
        else:
            assert name.endswith("experts.down_proj"), name
            for i, matrix in enumerate(tensor):
                matrix.copy_(meant[f"{name.removesuffix('down_proj')}{i}.down_proj.weight"])


@pytest.mark.parametrize("block", [128, 16, 24])
@pytest.mark.parametrize("name", ["v3", "v2-lite", "qwen3-moe"])
def test_fp8_squares(tmp_path: Path, name: str, block: int) -> None:
    """As DeepSeek-V3 stores all its linear layers; 24 divides none of the sizes."""
    hf = write_reference(tmp_path, name)
    meant = quantize(tmp_path, LINEAR, lambda w: fp8(w, block), fp8_tag(block))
    model = load_target(tmp_path)
    assert {"attention", "mlp", "experts"} <= stored_parts(model.config)
    stored = load_file(tmp_path / "model.safetensors")
    kinds = {parameter.dtype for parameter in model.parameters()}
    assert kinds == {torch.float8_e4m3fn, torch.float32}
    assert sum(p.nbytes for p in model.parameters()) == sum(t.nbytes for t in stored.values())
    load_meant(hf, meant)
    logits_TV, _ = run_reference(hf, TOKENS)
    torch.testing.assert_close(run_paged(model, TOKENS)[0], logits_TV, atol=1e-4, rtol=0)


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_a_dense_target(tmp_path: Path, scheme: str) -> None:
    """Merged projections: each part's rows of numbers and of scales lie in their place."""
    shape = TargetShape(num_layers=2)
    write_target(tmp_path, shape)
    tag = copy.deepcopy(INT4_TAG) | {"ignore": ["lm_head"]} if scheme == "int4" else fp8_tag(24)
    meant = quantize(tmp_path, LINEAR, int4 if scheme == "int4" else lambda w: fp8(w, 24), tag)
    plain = write_target(tmp_path / "plain", shape)
    assert not all(torch.equal(meant[name], plain[name]) for name in plain)
    save_file(meant, tmp_path / "plain/model.safetensors")
    ours, theirs = load_target(tmp_path), load_target(tmp_path / "plain")
    assert stored_parts(ours.config) == {"attention", "mlp"}
    one, two = (full_forward(m, [1, 5, 9])[0].hidden_TH for m in (ours, theirs))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
    assert set(target_tensors(shape)) == set(plain)


def test_every_4_bit_number() -> None:
    packed = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)  # 0xFEDCBA98
    scale = torch.tensor([[2.0]])
    expected = (torch.arange(16.0) - 8) * 2
    assert torch.equal(unpack_int4(packed, scale, torch.float32)[0], expected)


def test_bfloat16_rounds_once() -> None:
    quant = QuantConfig(scheme="int4", group_size=32, parts=frozenset())
    made = StoredWeight(32, 1, quant=quant, dtype=torch.bfloat16, device="cpu")
    made.weight_packed.fill_(0x77777777)  # all are -1
    made.weight_scale.fill_(0.3)
    assert torch.equal(made.dense(), torch.full((1, 32), -0.3, dtype=torch.bfloat16))


def test_inputs_that_cannot_be_grouped_are_refused() -> None:
    quant = QuantConfig(scheme="int4", group_size=32, parts=frozenset())
    with pytest.raises(ValueError, match="48 inputs are no multiple of a group of 32"):
        StoredWeight(48, 1, quant=quant, dtype=torch.float32, device="meta")


def edit_tag(folder: Path, tag: dict[str, Any]) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": tag}))
    return read_target_config(folder)


def changed(**weights: Any) -> dict[str, Any]:
    tag = copy.deepcopy(INT4_TAG)
    tag["config_groups"]["group_0"]["weights"] |= weights
    return tag


UNKNOWN = {
    "8 bits": changed(num_bits=8),
    "asymmetric": changed(symmetric=False),
    "floats": changed(type="float"),
    "by channel": changed(strategy="channel"),
    "reordered": changed(actorder="group"),
    "no group size": changed(group_size=None),
    "another format": INT4_TAG | {"format": "marlin-24"},
    "a quantized cache": INT4_TAG | {"kv_cache_scheme": {"num_bits": 8}},
    "a quantized head": INT4_TAG | {"ignore": INT4_TAG["ignore"][1:]},
    "some layers": INT4_TAG | {"ignore": [*INT4_TAG["ignore"], "re:.*layers.1.mlp.experts.*"]},
    "a format of another kind": INT4_TAG | {"format": ["pack-quantized"]},
    "layers of another kind": INT4_TAG | {"ignore": 5},
    "a broken pattern": INT4_TAG | {"ignore": [*INT4_TAG["ignore"], "re:("]},
    "one name": fp8_tag(128) | {"modules_to_not_convert": "lm_head"},
    "no squares": fp8_tag(128) | {"weight_block_size": None},
    "oblong": fp8_tag(128) | {"weight_block_size": [1, 128]},
    "another method": {"quant_method": "awq"},
}


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_formats_that_are_not_read_are_told_apart(tmp_path: Path, name: str) -> None:
    """They keep their method's name, by which the check refuses them."""
    write_reference(tmp_path, "kimi-k2")
    assert edit_tag(tmp_path, INT4_TAG).quant is not None
    config = edit_tag(tmp_path, UNKNOWN[name])
    assert config.quant is None
    assert config.quantization == UNKNOWN[name]["quant_method"]


def test_layers_that_are_left_out_of_fp8(tmp_path: Path) -> None:
    write_reference(tmp_path, "v3")
    tag = fp8_tag(128) | {"modules_to_not_convert": ["lm_head", "self_attn", "shared_experts"]}
    assert stored_parts(edit_tag(tmp_path, tag)) == {"mlp", "experts"}


def test_stored_kinds_are_not_converted(tmp_path: Path) -> None:
    """Integers of another size, or plain weights where quantized ones are named, are refused."""
    write_reference(tmp_path, "kimi-k2", **SIZES)
    quantize(tmp_path, EXPERT, int4, INT4_TAG)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.0.up_proj.weight_packed"
    wrong = {n: t.to(torch.int64) if n == name else t for n, t in tensors.items()}
    save_file(wrong, tmp_path / "model.safetensors")
    with pytest.raises(EyasError, match="weight_packed is int64, expected int32"):
        load_target(tmp_path)
