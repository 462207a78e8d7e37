"""Lengths in the check: limits of both rotary embeddings, windows, and serving past a limit."""

from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import (
    DraftShape,
    TargetShape,
    draft_config,
    write_draft,
    write_target,
)
from fixtures.tiny import random_prompts

from eyas.config import EngineConfig
from eyas.engine.check import CheckReport, run_check
from eyas.engine.load import load_engine
from eyas.types import SamplingParams, Severity

LINEAR = {"type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target of 512 positions and a draft that names 2048."""
    write_target(tmp_path / "target")
    write_draft(tmp_path / "draft")
    return tmp_path


def checked(folder: Path, *, budget: int = 1 << 34, **settings: Any) -> CheckReport:
    settings = {"draft": str(folder / "draft"), "device": "cpu"} | settings
    config = EngineConfig(model=str(folder / "target"), max_batch_size=2, **settings)
    return run_check(config, budget_bytes=budget)


def codes(report: CheckReport) -> list[str]:
    return [finding.code for finding in report.findings]


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [(None, 512), (LINEAR, 1024), (DYNAMIC, 1024), (YARN, 2048), (LLAMA3, 512)],
)
def test_a_length_above_the_target_s_positions(
    folder: Path, scaling: dict[str, Any] | None, limit: int
) -> None:
    write_target(folder / "target", config={"rope_scaling": scaling})
    assert checked(folder, max_model_len=limit).ok
    report = checked(folder, max_model_len=limit + 1)
    (finding,) = report.of(Severity.ERROR)
    assert finding.code == "model-length" and f"use at most {limit}" in finding.hint
    # Without a wish, the file's own length is served and no finding is made of the scaling.
    assert codes(checked(folder)) == []
    assert f"target {limit} positions" in checked(folder).facts["positions"]


def test_a_nominal_number_of_draft_positions_is_no_finding(folder: Path) -> None:
    """Published drafts say 2048 whatever they were made for."""
    write_target(folder / "target", config={"max_position_embeddings": 4096})
    report = checked(folder)
    assert report.ok and codes(report) == []
    assert "draft 2048 positions" in report.facts["positions"]
    assert "its table extended to 4096" in report.facts["positions"]
    assert "extended" not in checked(folder, max_model_len=2048).facts["positions"]


@pytest.mark.parametrize("scaling", [LINEAR, DYNAMIC, YARN, LLAMA3])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_draft_whose_scaling_ends_early(
    folder: Path, scaling: dict[str, Any], is_nested: bool
) -> None:
    limit = {"linear": 256, "dynamic": 256, "yarn": 512, "llama3": 128}
    kind = scaling.get("rope_type", "linear")
    scaling = scaling | ({"original_max_position_embeddings": 128} if kind == "yarn" else {})
    shape = DraftShape(
        format="speculators" if is_nested else "specforge",
        layer_ids=(2, 4, 5) if is_nested else (1, 3, 4),
        rope_scaling=scaling,
    )
    config: dict[str, Any] = {"max_position_embeddings": 128}
    if is_nested:
        layer = draft_config(shape)["transformer_layer_config"] | config
        config = {"transformer_layer_config": layer}
    write_draft(folder / "draft", shape, config=config)
    write_target(folder / "target", config={"max_position_embeddings": 1024})
    report = checked(folder)
    (finding,) = [f for f in report.findings if f.code != "norm-before-residual-absent"]
    assert report.ok and (finding.code, finding.subject) == ("draft-positions", "draft")
    assert f"reaches {limit[kind]} positions" in finding.message
    assert f"--max-model-len {limit[kind]} " in finding.hint
    within = checked(folder, max_model_len=limit[kind])
    assert "draft-positions" not in codes(within)


def test_a_length_that_the_plan_cut_is_the_one_that_counts(folder: Path) -> None:
    write_draft(
        folder / "draft",
        DraftShape(rope_scaling=LINEAR),
        config={"max_position_embeddings": 128},
    )
    assert codes(checked(folder)) == ["draft-positions"]
    report = checked(folder, budget=2_500_000)
    assert report.plan is not None and report.plan.max_model_len <= 256
    assert codes(report) == ["model-length-reduced"]


def test_a_stretched_base_is_said(folder: Path) -> None:
    write_target(folder / "target", config={"rope_scaling": DYNAMIC})
    text = checked(folder, max_model_len=1000).facts["positions"]
    assert "dynamic ×2" in text and "stretched once for 1000, for shorter requests too" in text
    assert "stretched" not in checked(folder).facts["positions"]


@pytest.mark.parametrize("subject", ["target", "draft"])
def test_windows(folder: Path, subject: str) -> None:
    if subject == "draft":
        write_draft(folder / "draft", config={"sliding_window": 128})
    else:
        window = {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}
        architecture = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        shape = TargetShape(architecture="Qwen3ForCausalLM")
        write_target(folder / "target", shape, config=window | architecture)
    (finding,) = checked(folder).findings
    assert (finding.code, finding.subject) == ("sliding-window", subject)
    assert "--max-model-len 128" in finding.hint
    assert checked(folder, max_model_len=128).ok


def generate(folder: Path, prompts: list[list[int]], *, draft: bool) -> list[list[int]]:
    """Greedy answers to the length limit of 96."""
    config = EngineConfig(
        model=str(folder / "target"),
        draft=str(folder / "draft") if draft else None,
        device="cpu",
        max_batch_size=4,
        max_model_len=96,
    )
    engine = load_engine(config).engine
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(temperature=0, ignore_eos=True))
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            answers[int(output.request_id)] += output.new_token_ids
    return answers


@pytest.mark.parametrize("scaling", [None, LINEAR])
def test_requests_on_both_sides_of_the_draft_s_limit(
    folder: Path, scaling: dict[str, Any] | None
) -> None:
    """Below it, above it, across it in a prompt and in an answer: the text is the target's."""
    shape = DraftShape(rope_scaling=scaling)
    write_draft(folder / "draft", shape, config={"max_position_embeddings": 32})
    prompts = random_prompts([3, 30, 33, 80], vocab_size=256)
    answers = generate(folder, prompts, draft=True)
    assert [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)] == [96] * 4
    assert answers == generate(folder, prompts, draft=False)
