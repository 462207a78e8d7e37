"""Tensors of drafts in the check: each fault is told once, in the words that fit it best."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import DraftShape, write_draft, write_target, write_weights

from eyas.config import EngineConfig
from eyas.engine.check import run_check

SHAPE = DraftShape(fc_norm=True, qk_norm=True, layer_ids=(1, 3, 4))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_target(tmp_path)
    return tmp_path


def errors(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Messages by code for a draft that stores these tensors."""
    write_weights(folder / "draft", tensors)
    config = EngineConfig(model=str(folder), draft=str(folder / "draft"), device="cpu")
    findings = run_check(config, budget_bytes=1 << 34).findings
    return {f.code: f.message for f in findings if f.severity == "error"}


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.hidden_norm.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "norm.weight",
        "fc_norm.1.weight",
        "layers.0.self_attn.k_norm.weight",
    ],
)
def test_each_tensor_is_needed(folder: Path, name: str) -> None:
    tensors = write_draft(folder / "draft", SHAPE)
    assert errors(folder, tensors) == {}
    del tensors[name]
    assert errors(folder, tensors) == {"tensors-missing": f"1 missing: {name}"}


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ({"fc_norm.3.weight": torch.ones(64)}, "tensors-left-over"),
        ({"verifier_norm.weight": torch.ones(64)}, "draft-unknown-tensors"),
        ({"model.norm.weight": torch.ones(64)}, "draft-tensors-twice"),
        ({"norm.weight": torch.ones(63)}, "tensors-wrong-shape"),
        ({"fc.weight": torch.ones(64, 100)}, "fc-width"),
        ({"fc.weight": torch.ones(64, 256)}, "fc-width"),
        ({"d2t": torch.zeros(90, dtype=torch.int64)}, "vocab-map-size"),
        ({"d2t": torch.zeros(1, 97, dtype=torch.int64)}, "vocab-map-size"),
    ],
)
def test_told_once(folder: Path, extra: dict[str, Any], code: str) -> None:
    tensors = write_draft(folder / "draft", SHAPE)
    found = errors(folder, tensors | extra)
    assert list(found) == [code]
