"""What the check says of a vision tower: served, without weights, switched off, without Pillow."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.allocations import allocated_peak
from fixtures.kimi_vision import write_kimi_vision
from fixtures.mixtures import deepseek_config, fill
from safetensors.torch import load_file, save_file

from eyas.config import EngineConfig
from eyas.engine.check import run_check
from eyas.engine.check_report import CheckReport
from eyas.engine.memory_images import encoding_bytes
from eyas.models.config import VisionConfig
from eyas.models.images import fitted_size, largest_tokens
from eyas.models.kimi_k25 import KimiK25ForConditionalGeneration
from eyas.types import Severity


def check(folder: Path, **settings: Any) -> CheckReport:
    settings = {"max_model_len": 64, "max_batch_size": 2, "device": "cpu"} | settings
    return run_check(EngineConfig(model=str(folder), **settings), budget_bytes=2**40)


def codes(report: CheckReport) -> list[str]:
    return [f.code for f in report.findings if f.code != "tokenizer-missing"]


def drop(folder: Path, *starts: str) -> None:
    """Take tensors out of a checkpoint."""
    file = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if not k.startswith(starts)}, file)


def test_a_whole_checkpoint_serves_images(tmp_path: Path) -> None:
    write_kimi_vision(tmp_path)
    report = check(tmp_path)
    assert codes(report) == [] and report.target is not None and report.plan is not None
    assert report.target.vision is not None and not report.target.vision.halves
    assert report.facts["images"].startswith("8 × 8 pixels a token")
    without = check(tmp_path, images=False)
    assert codes(without) == [] and without.target is not None and without.target.vision is None
    assert without.facts["images"] == "refused"
    assert "vision_tower.* (" in without.facts["not read"]
    # Some tensors of the checkpoint are the tower's: its memory is not needed then.
    tensors = load_file(tmp_path / "model.safetensors")
    tower = [t for k, t in tensors.items() if k.startswith(("vision_tower.", "mm_projector."))]
    assert without.plan is not None
    saved = report.plan.target_weight_bytes - without.plan.target_weight_bytes
    assert saved == sum(tensor.nbytes for tensor in tower)
    assert without.plan.activation_bytes < report.plan.activation_bytes


def test_without_the_towers_weights_text_is_served(tmp_path: Path) -> None:
    write_kimi_vision(tmp_path)
    drop(tmp_path, "vision_tower.", "mm_projector.")
    report = check(tmp_path)
    assert codes(report) == ["vision-weights-missing"] and report.ok
    assert "requests with images are refused" in report.findings[-1].message
    assert codes(check(tmp_path, images=False)) == []


def test_half_a_tower_is_refused(tmp_path: Path) -> None:
    write_kimi_vision(tmp_path)
    drop(tmp_path, "vision_tower.encoder.blocks.1.", "mm_projector.proj.2.")
    (finding,) = check(tmp_path).of(Severity.ERROR)
    assert finding.code == "tensors-missing" and "14 missing" in finding.message
    assert "vision_tower.encoder.blocks.1.wqkv.weight" in finding.message


def test_a_tower_of_another_size_is_refused(tmp_path: Path) -> None:
    write_kimi_vision(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] |= {"init_pos_emb_height": 8}
    path.write_text(json.dumps(config))
    (finding,) = check(tmp_path).of(Severity.ERROR)
    assert finding.code == "tensors-wrong-shape"
    assert "vision_tower.patch_embed.pos_emb.weight is [6, 6, 24], expected [8, 6, 24]" in str(
        finding
    )


def test_without_pillow_text_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kimi_vision(tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "PIL" else find_spec(name)
    )
    report = check(tmp_path)
    assert codes(report) == ["pillow-missing"] and report.ok
    assert report.target is not None and report.target.vision is None


WIDE = VisionConfig(
    num_layers=2,
    hidden_size=128,
    intermediate_size=480,
    num_heads=4,
    patch_size=6,
    grid_size=(8, 8),
    placeholder_id=3,
    max_patches=1024,
    max_side_patches=64,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"intermediate_size": 128}, {"patch_size": 40, "hidden_size": 16, "intermediate_size": 8}],
    ids=["mlp", "attention", "pixels"],
)
@torch.inference_mode()
def test_the_planned_memory_is_what_encoding_takes(
    changes: dict[str, int], dtype: torch.dtype
) -> None:
    vision = dataclasses.replace(WIDE, **changes)
    target = deepseek_config(vision=vision)
    model = KimiK25ForConditionalGeneration(target, dtype=dtype, device="cpu")
    fill(model, seed=0)
    side = 32 * vision.patch_size
    assert fitted_size(side, side, vision)[0] == (side, side)  # as large as it goes
    pixels = torch.zeros(side, side, 3, dtype=torch.uint8)
    peak = allocated_peak(lambda: model.encode_image(pixels))
    planned = encoding_bytes(target, dtype.itemsize) * (16 * 16 / largest_tokens(vision))
    assert 0.8 * planned < peak <= planned + 64  # mean and deviation of the colours
