"""Stored weights against config.json: dtypes, quantization, tied heads, numbers of layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import (
    DraftShape,
    TargetShape,
    stored_tensors,
    write_draft,
    write_target,
    write_weights,
)
from torch import Tensor

from eyas.config import EngineConfig
from eyas.engine.check import CheckReport, run_check
from eyas.engine.load import load_engine
from eyas.types import Finding, SamplingParams, Severity

Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good target and a good draft, to be changed."""
    write_target(tmp_path / "target")
    write_draft(tmp_path / "draft")
    return tmp_path


def checked(folder: Path, **settings: Any) -> CheckReport:
    settings = {"draft": str(folder / "draft"), "device": "cpu"} | settings
    config = EngineConfig(model=str(folder / "target"), **settings)
    return run_check(config, budget_bytes=1 << 34)


def codes(report: CheckReport, severity: Severity = Severity.ERROR) -> list[str]:
    return [finding.code for finding in report.of(severity)]


def only(report: CheckReport) -> Finding:
    (finding,) = report.findings
    return finding


@pytest.mark.parametrize(
    ("stored", "dtype", "is_warned"),
    [
        (torch.bfloat16, "float16", True),
        (torch.bfloat16, "auto", False),
        (torch.float16, "float16", False),
        (torch.float16, "bfloat16", False),
    ],
)
def test_float16_overflow(folder: Path, stored: torch.dtype, dtype: Any, is_warned: bool) -> None:
    write_target(folder / "target", dtype=stored)
    report = checked(folder, draft=None, dtype=dtype)
    assert codes(report, Severity.WARNING) == (["dtype-overflow"] if is_warned else [])
    assert report.ok


def test_float16_overflow_of_the_draft(folder: Path) -> None:
    write_target(folder / "target", dtype=torch.float16)
    write_draft(folder / "draft", dtype=torch.bfloat16)
    finding = only(checked(folder))
    assert (finding.subject, finding.code) == ("draft", "dtype-overflow")
    assert finding.hint.startswith("use --draft-dtype bfloat16")


def test_a_draft_of_another_dtype_is_no_matter(folder: Path) -> None:
    write_target(folder / "target", dtype=torch.bfloat16)
    write_draft(folder / "draft", dtype=torch.float16, kind="bin")
    assert checked(folder).findings == ()


def fp8(tensors: Tensors) -> Tensors:
    """Linear weights as FP8 with a scale each."""
    found = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        found[name] = tensors[name].to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.ones(1, 1)
    return found


def int4(tensors: Tensors) -> Tensors:
    """Linear weights as compressed-tensors packs them, eight in an int32."""
    found = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        rows, columns = found.pop(name).shape
        found[f"{name}_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
        found[f"{name}_scale"] = torch.ones(rows, columns // 32, dtype=torch.bfloat16)
        found[f"{name}_shape"] = torch.tensor([rows, columns])
    return found


def nvfp4(tensors: Tensors) -> Tensors:
    """Linear weights as ModelOpt packs them, two in a byte."""
    found = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        found[name] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        found[f"{name}_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
        found[f"{name}_scale_2"] = torch.ones(())
    return found


FORMATS: list[tuple[Callable[[Tensors], Tensors], dict[str, Any]]] = [
    (fp8, {"quant_method": "fp8", "activation_scheme": "static"}),
    (int4, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
]


@pytest.mark.parametrize(("quantize", "tag"), FORMATS)
def test_a_quantized_target_with_a_plain_draft(
    folder: Path, quantize: Callable[[Tensors], Tensors], tag: dict[str, Any]
) -> None:
    tensors = write_target(folder / "target", config={"quantization_config": tag})
    write_weights(folder / "target", quantize(tensors))
    finding = only(checked(folder))
    assert (finding.subject, finding.code) == ("target", "quantized-weights")
    assert tag["quant_method"] in finding.message


@pytest.mark.parametrize(("quantize", "tag"), FORMATS)
def test_a_quantized_draft_with_a_plain_target(
    folder: Path, quantize: Callable[[Tensors], Tensors], tag: dict[str, Any]
) -> None:
    shape = DraftShape()
    tensors = write_draft(folder / "draft", shape, config={"quantization_config": tag})
    write_weights(folder / "draft", stored_tensors(shape, quantize(tensors)))
    finding = only(checked(folder))
    assert (finding.subject, finding.code) == ("draft", "quantized-weights")


@pytest.mark.parametrize("subject", ["target", "draft"])
def test_a_tag_without_quantized_weights(folder: Path, subject: str) -> None:
    """Drafts get their target's config.json copied, the tag included."""
    write = {"target": write_target, "draft": write_draft}[subject]
    write(folder / subject, config={"quantization_config": {"quant_method": "fp8"}})  # type: ignore[operator]
    report = checked(folder)
    assert report.ok
    assert (only(report).subject, only(report).code) == (subject, "quantization-absent")


def test_quantized_weights_without_a_tag(folder: Path) -> None:
    write_weights(folder / "target", fp8(write_target(folder / "target")))
    assert codes(checked(folder)) == ["tensors-left-over", "tensors-wrong-dtype"]


def test_an_integer_head_of_a_draft(folder: Path) -> None:
    tensors = write_draft(folder / "draft")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    write_weights(folder / "draft", tensors)
    assert codes(checked(folder)) == ["tensors-wrong-dtype"]
    assert "lm_head.weight is int8" in only(checked(folder)).message


@pytest.mark.parametrize("claimed", [1, 7, 9, 40])
def test_a_target_that_lies_about_its_layers(folder: Path, claimed: int) -> None:
    write_target(folder / "target", config={"num_hidden_layers": claimed})
    found = [f for f in checked(folder, draft_boundaries=(0, 1)).findings if f.subject == "target"]
    assert [finding.code for finding in found] == ["layer-count"]
    assert f"num_hidden_layers = {claimed}, the weights hold 8 layers" in found[0].message


def test_a_layer_in_the_middle_that_is_missing_is_no_lie(folder: Path) -> None:
    tensors = write_target(folder / "target")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.3." not in name}
    write_weights(folder / "target", kept)
    assert codes(checked(folder)) == ["tensors-missing"]


def test_other_faults_are_told_beside_the_number_of_layers(folder: Path) -> None:
    tensors = write_target(folder / "target", config={"num_hidden_layers": 6})
    del tensors["model.norm.weight"]
    write_weights(folder / "target", tensors | {"model.layers.2.mlp.gate.weight": torch.ones(1)})
    found = checked(folder, draft=None)
    assert codes(found) == ["layer-count", "tensors-missing", "tensors-left-over"]
    assert [f.message[:10] for f in found.of(Severity.ERROR)[1:]] == ["1 missing:", "1 left ove"]


@pytest.mark.parametrize("num_layers", range(1, 8))
@pytest.mark.parametrize("format", ["safeailab", "specforge", "speculators"])
def test_targets_of_few_layers(folder: Path, num_layers: int, format: Any) -> None:
    """The default boundaries 2, n // 2 and n - 3 are three different ones from seven layers on."""
    write_target(folder / "target", TargetShape(num_layers=num_layers))
    write_draft(folder / "draft", DraftShape(format=format))
    report = checked(folder)
    assert report.ok == (num_layers == 7)
    if num_layers < 7:
        (finding,) = report.of(Severity.ERROR)
        assert finding.code.startswith("boundaries-") and "--draft-boundaries" in finding.hint
        assert str([2, num_layers // 2, num_layers - 3]) in finding.message
    named = (0, num_layers // 2, num_layers) if num_layers > 1 else None
    if named is not None:
        assert checked(folder, draft_boundaries=named).ok


def test_a_tied_head_that_is_stored_too_is_left_to_loading(folder: Path) -> None:
    tensors = write_target(folder / "target", TargetShape(tied=True))
    head = tensors["model.embed_tokens.weight"].clone()
    write_weights(folder / "target", tensors | {"lm_head.weight": head})
    report = checked(folder, draft=None)
    assert report.ok and codes(report, Severity.SKIPPED) == ["tied-head-stored"]


def test_an_untied_head_that_is_not_stored(folder: Path) -> None:
    tensors = write_target(folder / "target")
    del tensors["lm_head.weight"]
    write_weights(folder / "target", tensors)
    finding = only(checked(folder))
    assert finding.code == "head-missing" and "set it to true" in finding.hint


TIED = {"tie_word_embeddings": True, "draft_vocab_size": None}
# (shape, what a tied draft's head is: one of the draft's own tensors, or one of the target's)
TIED_DRAFTS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"tie_word_embeddings": True}, "draft", "lm_head.weight"),
    ({"has_embedding": True}, {"tie_word_embeddings": True}, "draft", "lm_head.weight"),
    ({"has_head": False, "has_embedding": True}, TIED, "draft", "embed_tokens.weight"),
    ({"has_head": False}, TIED, "target", "model.embed_tokens.weight"),
    ({"has_head": False}, {"draft_vocab_size": None}, "target", "lm_head.weight"),
]


@pytest.mark.parametrize(("shape", "config", "side", "name"), TIED_DRAFTS)
def test_the_head_of_a_tied_draft(
    folder: Path,
    shape: dict[str, Any],
    config: dict[str, Any],
    side: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own if one is stored, whatever the flag says; else the embedding which it uses."""
    monkeypatch.setattr("eyas.engine.load.choose_layouts", lambda *_: None)
    has_map = shape.get("has_head", True)
    tensors = {
        "target": write_target(folder / "target"),
        "draft": write_draft(folder / "draft", DraftShape(**shape, has_map=has_map), config=config),
    }
    assert codes(checked(folder)) == []
    loaded = load_engine(
        EngineConfig(
            model=str(folder / "target"),
            draft=str(folder / "draft"),
            device="cpu",
            max_model_len=64,
            max_batch_size=1,
        )
    )
    draft: Any = loaded.engine.worker.draft
    assert torch.equal(draft.lm_head.weight, tensors[side][name])
    loaded.engine.add("0", [1, 2, 3], SamplingParams(max_tokens=6, temperature=0))
    emitted = [
        token for _ in range(12) for out in loaded.engine.step() for token in out.new_token_ids
    ]
    assert len(emitted) == 6
