"""The check of Kimi-K2.5 from its config.json alone, in seconds, and of small ones with weights."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import DraftShape, write_draft
from fixtures.kimi_k25 import LATENT_DRAFT, LLAMA_DRAFT, write_kimi
from fixtures.mixtures import write_reference
from fixtures.quantized import EXPERT, INT4_TAG, LINEAR, fp8, fp8_tag, int4, quantize
from safetensors.torch import load_file, save_file

from eyas.config import EngineConfig
from eyas.engine.check import run_check
from eyas.engine.check_report import CheckReport
from eyas.engine.load import load_engine
from eyas.models.config import ModelConfig
from eyas.types import SamplingParams, Severity

GIB = 2**30
DRAFTS = {"llama": LLAMA_DRAFT, "latent": LATENT_DRAFT}


def check(folder: Path, *, budget_gib: int, **settings: Any) -> CheckReport:
    draft = str(folder / "draft") if (folder / "draft").exists() else None
    settings = {"max_model_len": 65536, "max_batch_size": 8} | settings
    config = EngineConfig(model=str(folder / "target"), draft=draft, **settings)
    return run_check(config, budget_bytes=budget_gib * GIB)


def codes(report: CheckReport, severity: Severity = Severity.ERROR) -> list[str]:
    return [finding.code for finding in report.of(severity)]


@pytest.mark.parametrize("name", list(DRAFTS))
def test_kimi_k25_with_a_draft(tmp_path: Path, name: str) -> None:
    write_kimi(tmp_path, DRAFTS[name])
    start = time.process_time()
    report = check(tmp_path, budget_gib=8 * 141)
    assert time.process_time() - start < 15  # a third of that where nothing else runs
    assert report.ok and report.plan is not None and report.draft is not None
    assert codes(report, Severity.SKIPPED) == ["weights-missing"] * 2
    assert "8 of 384 experts and shared ones of 2048 in 60 layers" in report.facts["target"]
    assert "int4 (groups of 32): experts" in report.facts["target"]
    rules = {"llama": "ids [2, 30, 58]", "latent": "ids [1, 29, 57]"}
    assert report.draft.boundaries == (2, 30, 58)
    assert report.facts["boundaries"].startswith(f"[2, 30, 58]: {rules[name]}")
    plan = report.plan
    # By hand: 4 bits and a 16-th of 16 bits a number of an expert, two bytes a number of the rest.
    experts = 60 * 384 * 3 * 7168 * 2048
    latent = 7168 * (1536 + 576) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168
    rest = 61 * (latent + 1536 + 512 + 2 * 7168) + 7168 + 2 * 163840 * 7168
    rest += 3 * 7168 * (18432 + 60 * 2048) + 60 * 384 * 7168
    block = 4 * 1152 * 1152 + 2 * 1152 * 4304 + 9 * 1152 + 4304
    rest += 27 * block + 1152 * (3 * 14 * 14 + 64 * 64 + 3)  # the vision tower
    rest += 2 * 1152 + 4608 * 4608 + 4608 + 4608 * 7168 + 7168  # and its projector
    assert plan.target_weight_bytes == experts * 9 // 16 + rest * 2 + 60 * 384 * 4
    assert report.facts["images"].startswith("28 × 28 pixels a token, at most 16384 patches")
    draft = 576 if name == "latent" else 2 * 64 * 128
    assert plan.kv_bytes_per_token == 2 * (61 * 576 + draft)
    assert plan.fits and plan.max_model_len == 65536
    assert json.loads(report.to_json())["target"]["quant"]["parts"] == ["experts"]


def test_the_explained_plan_counts_numbers_and_not_bytes(tmp_path: Path) -> None:
    write_kimi(tmp_path, LATENT_DRAFT)
    sections = {section.title: section for section in check(tmp_path, budget_gib=1128).sections}
    target = sections["weights"].rows[0]
    assert 1.02e12 < target["parameters"] < 1.03e12
    assert sections["KV cache"].rows[0]["value_dim"] == 512


@pytest.mark.parametrize(("budget_gib", "code"), [(500, "memory-weights"), (600, "memory")])
def test_too_small_devices_are_refused_with_numbers(
    tmp_path: Path, budget_gib: int, code: str
) -> None:
    write_kimi(tmp_path, LLAMA_DRAFT)
    report = check(tmp_path, budget_gib=budget_gib, max_batch_size=64, max_model_len=262144)
    assert codes(report) == [code]
    (finding,) = report.of(Severity.ERROR)
    hint = {"memory-weights": "use a device with at least ", "memory": "--max-model-len "}[code]
    assert hint in finding.hint


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    narrow = LLAMA_DRAFT | {"target_hidden_size": 4096, "mystery_norm": True}
    write_kimi(tmp_path, narrow, topk_method="other", hidden_act="gelu", qk_rope_head_dim=7)
    report = check(tmp_path, budget_gib=1128)
    text = " ".join(finding.message for finding in report.of(Severity.ERROR))
    for word in ("topk_method", "hidden_act", "qk_rope_head_dim", "mystery_norm"):
        assert word in text


def small_kimi(folder: Path, **changes: Any) -> None:
    """A small checkpoint in Kimi-K2.5's layout, experts in INT4, with vision weights."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 256}
    write_reference(folder, "kimi-k2", **(sizes | changes))
    quantize(folder, EXPERT, int4, INT4_TAG)
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(4, 3, 2, 2)
    tensors["mm_projector.proj.0.weight"] = torch.ones(4, 4)
    tensors["mm_projector.proj.2.weight"] = torch.ones(4, 4)
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text}))
    (folder / "tokenizer.json").write_text("{}")


def test_a_small_kimi_loads_and_speaks_the_same_with_and_without_a_draft(tmp_path: Path) -> None:
    small_kimi(tmp_path / "target", num_hidden_layers=8)
    write_draft(tmp_path / "draft", DraftShape(layer_ids=(2, 4, 5)))
    report = check(tmp_path, budget_gib=64, max_model_len=128)
    assert report.findings == ()
    assert report.facts["not read"] == (
        "vision_tower.* (1 tensors): images are not served; text does not need it; "
        "mm_projector.* (2 tensors): images are not served; text does not need it"
    )
    texts = []
    for draft in (None, str(tmp_path / "draft")):
        config = EngineConfig(
            model=str(tmp_path / "target"),
            draft=draft,
            device="cpu",
            max_model_len=128,
            max_batch_size=2,
            kv_cache_tokens=512,
        )
        engine = load_engine(config).engine
        engine.add("x", list(range(3, 40)), SamplingParams(max_tokens=30, temperature=0))
        tokens: list[int] = []
        while engine.has_work:
            tokens += [token for output in engine.step() for token in output.new_token_ids]
        texts.append(tokens)
    assert texts[0] == texts[1] and len(set(texts[0])) > 5


def test_a_fp8_target_does_not_hand_its_format_to_the_draft(tmp_path: Path) -> None:
    write_reference(tmp_path / "target", "v3", hidden_size=64, num_hidden_layers=8, vocab_size=256)
    quantize(tmp_path / "target", LINEAR, lambda w: fp8(w, 16), fp8_tag(16))
    (tmp_path / "target/tokenizer.json").write_text("{}")
    write_draft(tmp_path / "draft", DraftShape(layer_ids=(2, 4, 5)))
    report = check(tmp_path, budget_gib=64, max_model_len=128)
    assert report.findings == ()
    assert report.draft is not None and report.draft.decoder.quant is None
    assert report.target is not None and report.target.quant is not None


def test_a_tag_without_quantized_weights_is_not_believed(tmp_path: Path) -> None:
    write_reference(tmp_path / "target", "v3")
    path = tmp_path / "target/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": INT4_TAG}))
    report = check(tmp_path, budget_gib=64, max_model_len=128)
    assert report.ok and codes(report, Severity.WARNING) == [
        "tokenizer-missing",
        "quantization-absent",
    ]
    target: ModelConfig | None = report.target
    assert target is not None and target.quant is None
    assert dataclasses.replace(target, quant=None) == target


def test_a_missing_expert_is_found_before_the_load(tmp_path: Path) -> None:
    small_kimi(tmp_path / "target")
    file = tmp_path / "target/model.safetensors"
    tensors = load_file(file)
    where = "language_model.model.layers.1.mlp.experts"
    del tensors[f"{where}.3.up_proj.weight_scale"]
    tensors[f"{where}.2.up_proj.weight_packed"] = torch.zeros(32, 4, dtype=torch.int32)
    save_file(tensors, file)
    report = check(tmp_path, budget_gib=64, max_model_len=128)
    assert codes(report) == ["tensors-missing", "tensors-wrong-shape"]
    assert f"{where}.3.up_proj.weight_scale" in report.of(Severity.ERROR)[0].message
