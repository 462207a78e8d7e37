"""The contract check: everything at once, in seconds, and without reading weights."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import (
    DraftShape,
    TargetShape,
    draft_config,
    target_config,
    write_config,
    write_draft,
    write_target,
    write_weights,
)
from rich.console import Console

from eyas.config import EngineConfig
from eyas.engine import check
from eyas.engine.check import CheckReport, run_check
from eyas.models import decoder
from eyas.models.checkpoint import Checkpoint
from eyas.types import CheckError, Severity

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a good target and a good draft, to be damaged."""
    write_target(tmp_path / "target")
    write_draft(tmp_path / "draft")
    return tmp_path / "target", tmp_path / "draft"


def checked(pair: tuple[Path, Path], *, budget: int = 1 << 34, **settings: Any) -> CheckReport:
    target, draft = pair
    settings = {"draft": str(draft), "device": "cpu"} | settings
    return run_check(EngineConfig(model=str(target), **settings), budget_bytes=budget)


def codes(report: CheckReport, severity: Severity = Severity.ERROR) -> list[str]:
    return [finding.code for finding in report.of(severity)]


def test_a_good_pair(pair: tuple[Path, Path]) -> None:
    report = checked(pair)
    assert report.ok and report.findings == ()
    assert report.target is not None and report.draft is not None and report.plan is not None
    assert report.plan.max_model_len == 512
    report.raise_on_errors()


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
def test_other_good_targets(tmp_path: Path, architecture: str, tied: bool) -> None:
    write_target(tmp_path, TargetShape(architecture=architecture, tied=tied))
    report = checked((tmp_path, tmp_path), draft=None)
    assert report.findings == () and report.draft is None


@pytest.mark.parametrize("format", ["safeailab", "specforge", "speculators"])
@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "fc_bias": True},
        {"hidden_size": 48, "has_embedding": True},
        {"num_states": 4, "layer_ids": (2, 4, 6, 8)},
        {"draft_vocab_size": 256, "has_map": False},
    ],
)
def test_other_good_drafts(pair: tuple[Path, Path], format: Any, flags: dict[str, Any]) -> None:
    write_draft(pair[1], DraftShape(format=format, **flags))
    assert codes(checked(pair)) == []


def test_no_weight_is_read(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read = Checkpoint.read
    names = []

    def spy(self: Checkpoint, name: str) -> torch.Tensor:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "read", spy)
    assert checked(pair).ok
    assert names == ["d2t", "t2d"]


def test_everything_wrong_comes_at_once(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    shape = DraftShape(target_hidden_size=32, layer_ids=(1, 3, 40))
    tensors = write_draft(draft, shape, config={"brand_new_norm": True})
    tensors["d2t"] = tensors["d2t"] + 200
    write_weights(draft, tensors)
    stored = write_target(target)
    del stored["model.layers.3.mlp.up_proj.weight"]
    stored["model.layers.0.gate.weight"] = torch.zeros(1)
    write_weights(target, stored)
    (target / "tokenizer.json").unlink()
    report = checked(pair, max_model_len=4096)
    assert set(codes(report)) == {
        "tensors-missing",
        "tensors-left-over",
        "draft-option-unknown",
        "target-width",
        "boundaries-out-of-range",
        "vocab-map-out-of-range",
        "model-length",
    }
    assert codes(report, Severity.WARNING) == ["tokenizer-missing", "boundaries-guessed"]
    with pytest.raises(CheckError) as raised:
        report.raise_on_errors()
    assert raised.value.findings == report.findings
    for finding in report.findings:
        assert finding.hint or finding.severity is Severity.SKIPPED


def test_both_sides_unreadable(tmp_path: Path) -> None:
    write_draft(tmp_path / "draft", config={"brand_new_norm": True})
    write_config(tmp_path / "target", target_config(TargetShape()), {"architectures": ["Foo"]})
    (tmp_path / "target" / "model.safetensors").write_bytes(LFS)
    report = checked((tmp_path / "target", tmp_path / "draft"))
    assert codes(report) == ["unsupported-architecture", "weights-broken", "draft-option-unknown"]
    assert codes(report, Severity.SKIPPED) == ["target-unreadable"]
    assert report.target is None and report.plan is None


def test_folders_that_are_not_there(tmp_path: Path) -> None:
    report = checked((tmp_path / "a", tmp_path / "b"))
    assert codes(report) == ["target-not-found", "draft-not-found"]


def test_no_weight_files_yet(tmp_path: Path) -> None:
    write_config(tmp_path / "target", target_config(TargetShape()))
    write_config(tmp_path / "draft", draft_config(DraftShape()))
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    report = checked((tmp_path / "target", tmp_path / "draft"))
    assert report.ok and codes(report, Severity.SKIPPED) == ["weights-missing"] * 2
    assert report.summary().startswith("nothing wrong in what could be checked: 0 errors")
    assert report.plan is not None and report.plan.target_weight_bytes > 1_000_000


def test_eagle1_draft(pair: tuple[Path, Path]) -> None:
    tensors = write_draft(pair[1])
    tensors = {k: v for k, v in tensors.items() if k.startswith("layers") and "hidden_" not in k}
    write_weights(pair[1], tensors | {"fc.weight": torch.zeros(64, 128)})
    report = checked(pair)
    assert codes(report) == ["draft-kind-eagle1"]
    assert report.plan is None  # half a plan would be wrong


def test_a_scaling_that_the_models_lack_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("rope type 'linear' is not implemented")

    monkeypatch.setattr(decoder, "RotaryEmbedding", refuse)
    write_target(tmp_path)
    report = checked((tmp_path, tmp_path), draft=None)
    assert codes(report) == ["model-cannot-be-built"]
    assert "linear" in report.findings[0].message


def test_a_class_without_part_of_the_interface(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(decoder.DecoderForCausalLM, "get_embed_and_head")
    monkeypatch.delattr(decoder.DecoderForCausalLM, "set_eagle3_layers_to_capture")
    report = checked(pair)
    assert codes(report) == ["interface-members-missing"]
    for name in ("get_embed_and_head", "set_eagle3_layers_to_capture"):
        assert name in report.findings[0].message


def wrong_layer(self: Any, boundaries: Any) -> None:
    self._boundaries = tuple(b + 1 for b in boundaries)


def one_too_few(self: Any, boundaries: Any) -> None:
    self._boundaries = tuple(boundaries)[1:]


@pytest.mark.parametrize("fault", [wrong_layer, one_too_few])
def test_wrong_captures_are_seen(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    monkeypatch.setattr(decoder.DecoderForCausalLM, "set_eagle3_layers_to_capture", fault)
    assert codes(checked(pair)) == ["capture-wrong"]


def test_no_device(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert codes(checked(pair, device="cuda")) == ["device-missing"]


def hinted(report: CheckReport) -> list[dict[str, int | None]]:
    """The changes of settings that the hint of the last error offers, one of them to be taken."""
    hint = report.of(Severity.ERROR)[-1].hint.removeprefix("use ")
    offers = []
    for option in hint.split(" or "):
        option = option.replace("without --kv-cache-tokens", "--kv-cache-tokens None")
        words = option.replace("--", "").replace("-", "_").split()
        pairs = zip(words[::2], words[1::2], strict=True)
        offers.append({name: None if n == "None" else int(n) for name, n in pairs})
    return offers


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"max_model_len": 512}, ["max_batch_size", "max_model_len"]),
        ({"max_model_len": 512, "max_batch_size": 80}, ["max_batch_size"]),
        ({"kv_cache_tokens": 100_000}, ["kv_cache_tokens"]),
        ({"kv_cache_tokens": 100_000, "max_model_len": 300}, ["kv_cache_tokens"]),
        ({"kv_cache_tokens": 9, "max_batch_size": 80}, ["max_batch_size", "kv_cache_tokens"]),
    ],
)
@pytest.mark.parametrize("budget", [2_500_000, 4_000_000, 6_000_000])
def test_too_little_memory_says_what_would_fit(
    pair: tuple[Path, Path], settings: dict[str, int], names: list[str], budget: int
) -> None:
    report = checked(pair, budget=budget, **settings)
    if report.ok:
        assert budget == 6_000_000 and "max_model_len" in settings
        return
    assert codes(report) == ["memory"] and hinted(report)
    for offer in hinted(report):
        assert checked(pair, budget=budget, **settings | offer).ok, offer
    offered = {name for offer in hinted(report) for name in offer}
    assert offered & set(names)


def test_weights_that_do_not_fit_say_how_much_would(pair: tuple[Path, Path]) -> None:
    report = checked(pair, budget=1_000_000)
    assert codes(report) == ["memory-weights"]
    assert "device with at least" in report.findings[0].hint


def test_a_shorter_default_length_is_told(pair: tuple[Path, Path]) -> None:
    report = checked(pair, budget=4_000_000)
    assert report.ok and codes(report, Severity.WARNING) == ["model-length-reduced"]
    assert report.plan is not None and 64 <= report.plan.max_model_len < 512


def test_a_cache_below_the_length_is_told(pair: tuple[Path, Path]) -> None:
    report = checked(pair, kv_cache_tokens=100)
    assert report.ok and codes(report, Severity.WARNING) == ["kv-cache-below-length"]


def test_packed_copies(tmp_path: Path) -> None:
    write_target(tmp_path, TargetShape(tied=True))
    write_draft(
        tmp_path / "draft",
        DraftShape(has_head=False, has_map=False),
        config={"draft_vocab_size": None},
    )
    alone = checked((tmp_path, tmp_path), draft=None)
    both = checked((tmp_path, tmp_path / "draft"))
    assert alone.plan is not None and both.plan is not None
    assert alone.plan.packed_bytes == 256 * 64 * 4
    assert both.plan.packed_bytes == 2 * 256 * 64 * 4


def test_rendering(pair: tuple[Path, Path]) -> None:
    write_draft(pair[1], DraftShape(format="specforge", norm_output=True, layer_ids=(1, 3, 40)))
    report = checked(pair)
    console = Console(file=io.StringIO(), width=200)
    report.render(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for finding in report.findings:
        assert finding.code in text and finding.hint in text
    assert "norm_output" in text and "not ready: 1 error, 2 warnings, 0 skipped" in text


def test_json(pair: tuple[Path, Path]) -> None:
    data = json.loads(checked(pair, max_model_len=9999).to_json())
    assert data["ok"] is False
    assert data["findings"][0]["severity"] == "error"
    assert data["findings"][0]["code"] == "model-length"
    assert data["draft"]["boundaries"] == [2, 4, 5]
    assert data["plan"]["num_pages"] > 0


def test_it_is_quick_and_light(pair: tuple[Path, Path]) -> None:
    script = (
        "import sys, time; start = time.perf_counter()\n"
        "from eyas.config import EngineConfig\n"
        "from eyas.engine.check import run_check\n"
        f"report = run_check(EngineConfig(model={str(pair[0])!r}, draft={str(pair[1])!r}))\n"
        "heavy = [name for name in ('transformers', 'torch._dynamo') if name in sys.modules]\n"
        "print(report.ok, heavy, time.perf_counter() - start)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    ok, heavy, seconds = run.stdout.split()
    assert (ok, heavy) == ("True", "[]")
    assert float(seconds) < 15  # about 2 on two slow cores; the bound is for a loaded machine


def test_the_module_names_its_public_interface() -> None:
    assert set(check.__all__) == {"CheckReport", "run_check"}
