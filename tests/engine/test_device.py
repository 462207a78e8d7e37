"""Devices, dtypes and memory budgets."""

from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import TargetShape, write_target

from eyas.config import EngineConfig
from eyas.engine import device
from eyas.engine.device import memory_budget, resolve_device, resolve_dtype
from eyas.models.checkpoint import Checkpoint
from eyas.models.target_config import read_target_config
from eyas.types import EyasError


def test_auto_takes_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(EyasError, match="--device cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("setting", "config", "stored", "expected"),
    [
        ("auto", "bfloat16", torch.bfloat16, torch.bfloat16),
        ("float32", "bfloat16", torch.bfloat16, torch.float32),
        ("auto", ..., torch.float16, torch.float16),
        ("auto", ..., torch.float32, torch.float32),
    ],
)
def test_dtype(
    tmp_path: Path, setting: str, config: object, stored: torch.dtype, expected: torch.dtype
) -> None:
    write_target(tmp_path, TargetShape(num_layers=1), dtype=stored, config={"torch_dtype": config})
    settings = EngineConfig(model=str(tmp_path), dtype=setting)  # type: ignore[arg-type]
    checkpoint = Checkpoint.open(tmp_path)
    assert resolve_dtype(settings, read_target_config(tmp_path), checkpoint) == expected


def test_the_host_has_memory() -> None:
    budget = memory_budget("cpu")
    assert budget is not None and 0 < budget < 1 << 50


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_meminfo_bytes", lambda: 1 << 40)
    monkeypatch.setattr(device, "_cgroup_bytes", lambda: 1000)
    assert memory_budget("cpu") == 800


@pytest.mark.parametrize(
    ("limit", "expected"), [("1000\n", 1000 - (700 - 300)), ("max\n", None), (None, None)]
)
def test_control_groups(tmp_path: Path, limit: str | None, expected: int | None) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\nfile 300\n")
    assert device._cgroup_bytes(tmp_path) == expected


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("1000\n")
    (folder / "memory.usage_in_bytes").write_text("700\n")
    (folder / "memory.stat").write_text("cache 1\ntotal_cache 300\n")
    assert device._cgroup_bytes(tmp_path) == 600
