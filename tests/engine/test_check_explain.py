"""`eyas check --explain`: the plan at length, printed and as JSON."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import (
    DraftShape,
    TargetShape,
    target_config,
    write_config,
    write_draft,
    write_target,
)
from rich.console import Console

from eyas import kernels
from eyas.config import EngineConfig
from eyas.engine import device, load
from eyas.engine.check import CheckReport, run_check
from eyas.engine.device import backends


def checked(folder: Path, **settings: Any) -> CheckReport:
    settings = {"draft": str(folder / "draft"), "device": "cpu"} | settings
    config = EngineConfig(model=str(folder / "target"), max_batch_size=3, **settings)
    return run_check(config, budget_bytes=1 << 34)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_target(tmp_path / "target", dtype=torch.bfloat16)
    write_draft(tmp_path / "draft", DraftShape(format="specforge", layer_ids=(1, 3, 7)))
    return tmp_path


def rows(report: CheckReport, title: str) -> list[dict[str, Any]]:
    (section,) = [section for section in report.sections if section.title == title]
    return list(section.rows)


def test_boundaries_and_the_rule_behind_them(folder: Path) -> None:
    report = checked(folder)
    assert [(r["boundary"], r["fc_columns"]) for r in rows(report, "boundaries")] == [
        (2, "0..63"),
        (4, "64..127"),
        (8, "128..191"),
    ]
    states = [row["state"] for row in rows(report, "boundaries")]
    assert states[0] == "residual stream entering layer 2"
    assert states[2] == "residual stream after layer 7, before the final norm"
    assert report.draft is not None
    assert report.sections[0].note == report.draft.boundary_rule and "+1" in report.sections[0].note


def test_shapes_and_layouts(folder: Path) -> None:
    report = checked(folder)
    target, draft = rows(report, "KV cache")
    assert (target["layers"], target["kv_heads"], target["key_dim"]) == (8, 2, 16)
    assert target["token_bytes"] == 8 * 2 * (16 + 16) * 2
    assert (draft["layers"], draft["token_bytes"]) == (1, 2 * (24 + 24) * 2)
    assert draft["page_bytes"] == 16 * draft["token_bytes"]
    shapes = {row["model"]: row for row in rows(report, "shapes")}
    assert (shapes["target"]["hidden"], shapes["draft"]["head_dim"]) == (64, 24)
    weights = {row["model"]: row for row in rows(report, "weights")}
    assert weights["target"]["stored_as"] == "bfloat16"
    assert weights["draft"]["stored_bytes"] > weights["draft"]["parameters"] * 4 > 0


def test_bytes_add_up(folder: Path) -> None:
    report = checked(folder)
    sizes = {row["part"]: row["bytes"] for row in rows(report, "memory")}
    available, total = sizes.pop("available"), sizes.pop("total")
    assert report.plan is not None
    assert (available, total) == (1 << 34, report.plan.total_bytes)
    assert sum(sizes.values()) == total and {"slots", "page ends"} < set(sizes)


def test_backends_are_those_that_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {row["part"]: row["backend"] for row in rows(checked(folder), "backends")}
    assert named == backends("cpu")
    engine = load.load_engine(
        EngineConfig(model=str(folder / "target"), device="cpu", max_model_len=64)
    ).engine
    # Another attention or another kernel comes with another name here.
    assert type(engine.worker.runner.backend).__name__ == "TorchBackend"
    assert named["attention"].startswith("torch reference")
    assert kernels.rms_norm.__module__ == "eyas.kernels.dispatch"
    assert named["kernels"] == kernels.native.status()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "oneDNN" not in backends("cpu")["linear layers"]


@pytest.mark.parametrize("installed", [True, False])
def test_backends_of_a_gpu_depend_on_triton(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(device, "has_triton", lambda device: installed)
    named = backends("cuda")
    assert named["kernels"].startswith("Triton" if installed else "torch reference")
    assert named["attention"].startswith("Triton" if installed else "torch reference")
    assert named["linear layers"].startswith("cuBLAS")
    assert ("timed at load" in named["linear layers"]) is installed


def test_printed_and_as_json(folder: Path) -> None:
    report = checked(folder)
    console = Console(file=io.StringIO(), width=160)
    report.render_explain(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    explained = json.loads(report.to_json())["explain"]
    titles = ["boundaries", "shapes", "weights", "KV cache", "memory", "what fits", "backends"]
    assert [section["title"] for section in explained] == titles
    for section in explained:
        assert section["title"] in text and section["note"] in text
        for row in section["rows"]:
            for column, value in row.items():
                assert column.endswith("bytes") or str(value) in text


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    assert [section.title for section in checked(tmp_path).sections] == []
    write_config(tmp_path / "target", target_config(TargetShape()))
    report = checked(tmp_path)  # no weights, no draft to be found
    titles = [section.title for section in report.sections]
    assert titles == ["shapes", "weights", "backends"]
    assert rows(report, "weights")[0]["stored_as"] == "no weight files"
    report.render_explain(Console(file=io.StringIO()))
    alone = [section.title for section in checked(tmp_path, draft=None).sections]
    assert "boundaries" not in alone and "memory" in alone
