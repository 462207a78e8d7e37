"""Other kinds of drafts are refused by their names; EAGLE-3 drafts are not mistaken for them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import DraftShape, write_draft, write_target, write_weights

from eyas.models.config import ModelConfig
from eyas.models.draft_config import DraftReading, inspect_draft
from eyas.models.target_config import read_target_config


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder)
    return read_target_config(folder)


def errors(reading: DraftReading) -> list[str]:
    return [finding.code for finding in reading.findings.errors]


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"speculators_model_type": "peagle"}, "draft-kind-peagle"),
    ({"architectures": ["PEagleDraftModel"]}, "draft-kind-peagle"),
    ({"speculators_model_type": "dflash"}, "draft-kind"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "draft-kind-last-hidden"),
    (
        {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "gemma3"}},
        "draft-kind",
    ),
]


@pytest.mark.parametrize(("config", "code"), KINDS)
def test_other_kinds_by_config(
    tmp_path: Path, target: ModelConfig, config: dict[str, Any], code: str
) -> None:
    write_draft(tmp_path, config=config)
    assert errors(inspect_draft(tmp_path, target)) == [code]


def eagle1(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kept = {k: v for k, v in tensors.items() if k.startswith("layers.0") and "hidden_norm" not in k}
    return kept | {"fc.weight": torch.zeros(64, 128), "embed_tokens.weight": torch.zeros(256, 64)}


def second_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {
        k.replace("layers.0", "layers.1"): v for k, v in tensors.items() if k.startswith("layers.0")
    }


def whole_model(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in second_layer(tensors).items() if not k.startswith("fc.")}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (eagle1, "draft-kind-eagle1", "EAGLE-1 or EAGLE-2"),
        (second_layer, "draft-kind-layers", "2 decoder layers"),
        (lambda t: t | {"mask_hidden": torch.zeros(1)}, "draft-kind-peagle", "P-EAGLE"),
        (whole_model, "draft-kind", "whole model of 2 layers"),
        (lambda t: {"x": torch.zeros(1)}, "draft-kind", "something else"),
        (lambda t: t | {"gate.weight": torch.zeros(1)}, "draft-unknown-tensors", "gate.weight"),
        (
            lambda t: t | {"model.norm.weight": torch.zeros(64)},
            "draft-tensors-twice",
            "norm.weight",
        ),
    ],
)
def test_other_kinds_by_tensors(
    tmp_path: Path, target: ModelConfig, change: Any, code: str, words: str
) -> None:
    tensors = write_draft(tmp_path, config={"num_hidden_layers": 2})
    write_weights(tmp_path, change(tensors))
    reading = inspect_draft(tmp_path, target)
    assert errors(reading) == [code]
    assert words in reading.findings.errors[0].message


def test_two_states_are_not_mistaken_for_eagle1(tmp_path: Path, target: ModelConfig) -> None:
    write_draft(tmp_path, DraftShape(num_states=2, layer_ids=(2, 5)))
    assert errors(inspect_draft(tmp_path, target)) == []
