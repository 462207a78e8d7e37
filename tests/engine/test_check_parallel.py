"""The check for several ranks: Kimi-K2.5 on eight cards from its config.json alone, and what does
not divide or does not fit."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import DraftShape, TargetShape, write_draft, write_target
from fixtures.kimi_k25 import LATENT_DRAFT, LLAMA_DRAFT, write_kimi

from eyas.config import ConfigError, EngineConfig
from eyas.engine.check import run_check
from eyas.engine.check_report import CheckReport
from eyas.engine.device import memory_budget
from eyas.types import Finding, Severity

GIB = 2**30


def check(folder: Path, *, device_gib: float | None = 96, **settings: Any) -> CheckReport:
    draft = str(folder / "draft") if (folder / "draft").exists() else None
    settings = {"images": False} | settings
    config = EngineConfig(model=str(folder / "target"), draft=draft, **settings)
    return run_check(config, device_bytes=None if device_gib is None else int(device_gib * GIB))


def errors(report: CheckReport) -> dict[str, Finding]:
    return {finding.code: finding for finding in report.of(Severity.ERROR)}


@pytest.mark.parametrize("device_gib", [96, 141])
@pytest.mark.parametrize("by_number", [False, True])
def test_kimi_k25_on_eight_cards(tmp_path: Path, device_gib: int, by_number: bool) -> None:
    write_kimi(tmp_path, LLAMA_DRAFT)
    start = time.process_time()
    settings: dict[str, Any] = {"max_model_len": 65536, "expert_parallel": by_number}
    report = check(tmp_path, device_gib=device_gib, tensor_parallel_size=8, **settings)
    assert time.process_time() - start < 10  # a fifth of that where nothing else runs
    assert report.ok and report.plan is not None
    plan = report.plan
    # By hand, as in test_check_kimi: what is divided by eight, and what every rank holds.
    experts = 60 * 384 * 3 * 7168 * 2048 * 9 // 16
    heads = 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168
    divided = 61 * heads + 2 * 163840 * 7168 + 3 * 7168 * (18432 + 60 * 2048)
    held = 61 * (7168 * (1536 + 576) + 1536 + 512 + 2 * 7168) + 7168 + 60 * 384 * 7168
    assert plan.target_weight_bytes == (experts + divided * 2) // 8 + held * 2 + 60 * 384 * 4
    # The latent stands on every rank, the draft's 64 heads are eight on each.
    assert plan.kv_bytes_per_token == 2 * (61 * 576 + 2 * 8 * 128)
    budget = memory_budget("cuda", device_bytes=device_gib * GIB)
    assert plan.num_ranks == 8 and plan.budget_bytes == budget
    assert plan.fits and plan.kv_tokens >= plan.max_model_len == 65536
    assert "8 of 64 heads, the whole latent KV" in report.facts["ranks"]
    number = "48 of 384 experts (2048 of" if by_number else "384 of 384 experts (256 of"
    assert number in report.facts["ranks"]
    assert "a rank" in report.facts["memory"]


def test_without_a_length_it_is_what_fits(tmp_path: Path) -> None:
    write_kimi(tmp_path, LATENT_DRAFT)
    report = check(tmp_path, tensor_parallel_size=8)
    assert report.ok and report.plan is not None
    assert [f.code for f in report.of(Severity.WARNING)][-1] == "model-length-reduced"
    assert 65536 < report.plan.max_model_len < 262144


def test_three_ranks_are_refused_with_those_that_fit(tmp_path: Path) -> None:
    write_kimi(tmp_path, LLAMA_DRAFT)
    report = check(tmp_path, tensor_parallel_size=3, max_model_len=65536)
    assert list(errors(report)) == ["tensor-parallel-size"] and report.plan is None
    finding = errors(report)["tensor-parallel-size"]
    assert finding.message == (
        "3 ranks do not divide 64 attention heads, experts of an intermediate size of 2048 in "
        "groups of 32, shared experts of an intermediate size of 2048"
    )
    assert finding.hint == (
        "use --tp 8, 16, 32 or 64, which fit the memory (2, 4, 8, 16, 32 or 64 divide the model)"
    )
    for size in (4, 8):  # the check agrees with its own advice
        settings = {"tensor_parallel_size": size, "max_model_len": 65536}
        assert check(tmp_path, **settings).ok is (size == 8)


def test_small_cards_are_refused_with_numbers_that_work(tmp_path: Path) -> None:
    write_kimi(tmp_path, LLAMA_DRAFT)
    for num_ranks, device_gib, advice in ((8, 48, 16), (1, 141, 8)):
        report = check(tmp_path, device_gib=device_gib, tensor_parallel_size=num_ranks)
        hint = errors(report)["memory-weights"].hint
        assert hint.endswith(f"or --tp {advice}")
    assert check(tmp_path, device_gib=48, tensor_parallel_size=16).ok
    settings: dict[str, Any]
    for asked in ({}, {"max_model_len": 65536}, {"kv_cache_tokens": 4096, "max_batch_size": 2}):
        settings = asked | {"tensor_parallel_size": 8}
        hint = errors(check(tmp_path, device_gib=48, **settings))["memory-weights"].hint
        enough = float(hint.partition("--device-memory ")[2].partition(")")[0])
        assert check(tmp_path, device_gib=enough, **settings).ok
        assert not check(tmp_path, device_gib=enough - 0.2, **settings).ok
    settings = {"tensor_parallel_size": 8, "kv_cache_tokens": 400_000}
    report = check(tmp_path, max_model_len=65536, **settings)
    hint = errors(report)["memory"].hint
    assert hint.startswith("use --kv-cache-tokens ")
    settings["kv_cache_tokens"] = int(hint.split()[2])
    assert check(tmp_path, max_model_len=65536, **settings).ok


def small_pair(folder: Path, target: TargetShape, draft: DraftShape) -> None:
    write_target(folder / "target", target)
    write_draft(folder / "draft", draft)
    (folder / "target/tokenizer.json").write_text("{}")


def test_a_draft_that_does_not_divide_is_told(tmp_path: Path) -> None:
    small_pair(
        tmp_path, TargetShape(num_heads=4, num_kv_heads=2), DraftShape(num_heads=3, num_kv_heads=1)
    )
    report = check(tmp_path, tensor_parallel_size=4)
    assert report.ok
    (finding,) = report.findings
    assert finding.code == "draft-replicated"
    assert (
        "4 ranks do not divide 3 attention heads over 1 key/value heads of the draft"
        in finding.message
    )
    assert "1 of 2 KV heads (one on 2 ranks)" in report.facts["ranks"]
    assert "with 3 of 3 heads, 1 of 1 KV heads" in report.facts["ranks"]


def test_ranks_of_a_host_share_its_memory() -> None:
    assert memory_budget("cpu", num_ranks=4, device_bytes=GIB) == int(GIB * 0.8) // 4
    assert memory_budget("cuda", num_ranks=4, device_bytes=GIB) == int(GIB * 0.92)


def test_more_ranks_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pair(tmp_path, TargetShape(), DraftShape())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, GIB))
    report = check(tmp_path, device_gib=None, device="cuda", tensor_parallel_size=2)
    assert "2 needs as many GPUs, and 1 are visible" in errors(report)["device-count"].message


def test_experts_of_a_model_that_has_none(tmp_path: Path) -> None:
    small_pair(tmp_path, TargetShape(), DraftShape())
    report = check(tmp_path, tensor_parallel_size=2, expert_parallel=True)
    assert list(errors(report)) == ["expert-parallel"]
    with pytest.raises(ConfigError, match="--expert-parallel needs several ranks"):
        EngineConfig(model="x", expert_parallel=True)


def test_another_dtype_of_the_draft(tmp_path: Path) -> None:
    small_pair(tmp_path, TargetShape(), DraftShape())
    same = check(tmp_path, dtype="bfloat16").plan
    report = check(tmp_path, dtype="bfloat16", draft_dtype="float32")
    other = report.plan
    assert same is not None and other is not None
    assert "bfloat16 (draft float32)" in report.facts["device"]
    embedding = 256 * 64  # converted, as the target keeps its own
    maps = 97 * 8  # are integers
    assert other.draft_weight_bytes == 2 * (same.draft_weight_bytes - maps) + maps + embedding * 4
    assert other.kv_bytes_per_token - same.kv_bytes_per_token == 2 * 24 * 2 * 2
    assert dataclasses.replace(other, num_ranks=1).target_weight_bytes == same.target_weight_bytes
