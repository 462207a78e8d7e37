"""Named shapes are those of the models, and a draft is made to fit."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from eyas.bench.ceilings import RoundCost, round_cost
from eyas.bench.shapes import (
    SHAPES,
    boundaries_of,
    with_draft_defaults,
    write_shape,
)
from eyas.config import ConfigError, EngineConfig
from eyas.engine.check import run_check
from eyas.engine.check_report import CheckReport
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.registry import target_class
from eyas.types import EyasError

# Parameters that the models' publishers count (tied heads once).
NUM_PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-8b": 8_190_735_360,
}


def checked(name: str, folder: Path, **settings: object) -> CheckReport:
    given = with_draft_defaults({"model": name, "device": "cpu", "max_model_len": 768} | settings)
    config = write_shape(EngineConfig(**given), folder)
    report = run_check(config, budget_bytes=2**40)
    report.raise_on_errors()
    return report


def cost_of(report: CheckReport) -> RoundCost:
    assert report.target is not None and report.draft is not None and report.plan is not None
    dtype = torch.bfloat16
    target = target_class(report.target.architecture)(
        report.target, dtype=dtype, device="meta", max_model_len=1
    )
    draft = Eagle3Draft(report.draft, dtype=dtype, device="meta", max_model_len=1)
    return round_cost(
        report.target,
        report.draft,
        weight_bytes=(report.plan.target_weight_bytes, report.plan.draft_weight_bytes),
        layouts=(target.kv_layout, draft.kv_layout),
        dtypes=(dtype, dtype),
    )


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_sizes_are_the_published_ones(name: str, tmp_path: Path) -> None:
    report = checked(name, tmp_path)
    assert report.plan is not None and report.draft is not None and report.target is not None
    assert report.plan.target_weight_bytes == 2 * NUM_PARAMETERS[name]
    assert report.draft.draft_vocab_size == 32_000
    assert report.draft.decoder.hidden_size == report.target.hidden_size


def test_the_cost_of_the_8b(tmp_path: Path) -> None:
    cost = cost_of(checked("llama-3.1-8b", tmp_path))
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    norms = 4096 * 65
    assert cost.target_bytes == 2 * (32 * layer + 128256 * 4096 + norms)
    assert cost.target_kv_bytes == 131072
    assert cost.fc_bytes == 2 * 12288 * 4096
    assert cost.draft_bytes == pytest.approx(2 * (layer + 4096 * 6144 + 32000 * 4096), rel=1e-3)
    assert cost.draft_kv_bytes == 4096


def test_a_config_file_is_a_shape(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny"] | {"num_hidden_layers": 9}))
    for number, name in enumerate((folder, folder / "config.json")):
        report = checked(str(name), tmp_path / f"out{number}")
        assert report.target is not None and report.target.num_layers == 9
        assert report.draft is not None and report.draft.boundaries == (2, 4, 6)


def test_a_draft_needs_something_to_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["tiny"] | {"num_hidden_layers": 1}))
    with pytest.raises(EyasError, match="--draft none"):
        checked(str(path), tmp_path / "out")
    report = checked(str(path), tmp_path / "plain", draft="none")
    assert report.draft is None


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ],
)
def test_floors_are_of_dense_plain_models(tmp_path: Path, changes: dict[str, object]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["tiny"] | changes))
    with pytest.raises(EyasError, match="take a dense model in plain weights"):
        checked(str(path), tmp_path / "out")


@pytest.mark.parametrize(("num_layers", "expected"), [(2, (0, 1, 2)), (8, (2, 4, 5))])
def test_boundaries_ascend(num_layers: int, expected: tuple[int, ...]) -> None:
    assert boundaries_of(num_layers) == expected


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({}, (3.0,)),
        ({"num_speculative_tokens": 2}, (2.0,)),
        ({"num_speculative_tokens": 6}, (3.0,)),
        ({"simulate_acceptance": (2.5,)}, (2.5,)),
        ({"num_speculative_tokens": 0}, None),
        ({"draft": "none"}, None),
    ],
)
def test_simulated_acceptance(
    settings: dict[str, object], length: tuple[float, ...] | None
) -> None:
    config = EngineConfig(**with_draft_defaults({"model": "tiny"} | settings))
    assert config.simulate_acceptance == length


def test_a_real_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="makes its own draft"):
        with_draft_defaults({"model": "tiny", "draft": "some/folder"})


def test_unknown_shapes(tmp_path: Path) -> None:
    config = EngineConfig(model="llama-9")
    with pytest.raises(EyasError, match="use one of llama-3.1-8b, llama-3.2-1b, qwen3-8b, tiny"):
        write_shape(config, tmp_path / "a")
    with pytest.raises(EyasError, match="cannot be read"):
        write_shape(dataclasses.replace(config, model=str(tmp_path / "x.json")), tmp_path / "b")
