"""Drafts of every format as one config, and the kinds and combinations that are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import (
    DraftShape,
    draft_config,
    write_config,
    write_draft,
    write_target,
    write_weights,
)

from eyas.models.config import ModelConfig, RopeConfig
from eyas.models.draft_config import DraftReading, canonical_name, inspect_draft, read_draft_config
from eyas.models.target_config import read_target_config
from eyas.types import CheckError, Severity

FORMATS: list[Any] = ["safeailab", "specforge", "speculators"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FLAGS = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder)
    return read_target_config(folder)


def errors(reading: DraftReading) -> list[str]:
    return [finding.code for finding in reading.findings.errors]


def warnings(reading: DraftReading) -> list[str]:
    return [f.code for f in reading.findings if f.severity is Severity.WARNING]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_every_format_reads_alike(
    tmp_path: Path, target: ModelConfig, format: Any, kind: Any
) -> None:
    write_draft(tmp_path, DraftShape(format=format), kind=kind)
    draft = read_draft_config(tmp_path, target)
    assert (draft.format, draft.boundaries, draft.draft_vocab_size) == (format, (2, 4, 5), 97)
    assert (draft.has_embedding, draft.has_head, draft.has_d2t) == (False, True, True)
    decoder = draft.decoder
    # head_dim 24 is neither 64 / 4 nor any default; the rotary base is not the target's.
    assert (decoder.head_dim, decoder.intermediate_size, decoder.num_layers) == (24, 80, 1)
    assert (decoder.rope, decoder.rms_norm_eps) == (RopeConfig(theta=10000.0), 1e-6)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("flag", FLAGS)
def test_norm_flags(tmp_path: Path, target: ModelConfig, format: Any, flag: str) -> None:
    shape = dataclasses.replace(DraftShape(format=format), **{flag: True})
    write_draft(tmp_path, shape)
    draft = read_draft_config(tmp_path, target)
    assert {name: getattr(draft, name) for name in FLAGS} == {name: name == flag for name in FLAGS}


def test_flags_nested_in_eagle_config(tmp_path: Path, target: ModelConfig) -> None:
    shape = DraftShape(format="specforge", norm_before_fc=True)
    eagle = draft_config(shape)["eagle_config"] | {"norm_before_fc": True, "norm_output": True}
    write_draft(tmp_path, shape, config={"norm_before_fc": ..., "eagle_config": eagle})
    draft = read_draft_config(tmp_path, target)
    assert draft.norm_before_fc and draft.norm_output


def test_legacy_names_of_fc_norm(tmp_path: Path, target: ModelConfig) -> None:
    shape = DraftShape(fc_norm=True)
    tensors = write_draft(tmp_path, shape, config={"fc_norm": ..., "use_aux_norm": True})
    legacy = {
        "fc_norm.0": "aux_norm_low",
        "fc_norm.1": "aux_norm_mid",
        "fc_norm.2": "aux_norm_high",
    }
    renamed = {legacy.get(k.removesuffix(".weight"), k).removesuffix(".weight"): k for k in tensors}
    stored = {
        f"{new}.weight" if old.endswith(".weight") else new: tensors[old]
        for new, old in renamed.items()
    }
    write_weights(tmp_path, stored)
    assert read_draft_config(tmp_path, target).fc_norm


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("model.midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.fc.weight", "fc.weight"),
        ("aux_norm_mid.weight", "fc_norm.1.weight"),
        ("fc_norm.3.weight", "fc_norm.3.weight"),
        ("d2t", "d2t"),
        ("layers.1.mlp.up_proj.weight", None),
        ("midlayer.1.mlp.up_proj.weight", None),
        ("midlayer.self_attn.q_a_proj.weight", "layers.0.self_attn.q_a_proj.weight"),
        ("verifier_lm_head.weight", None),
        ("fc.weight_scale", None),
    ],
)
def test_canonical_names(stored: str, canonical: str | None) -> None:
    assert canonical_name(stored) == canonical


@pytest.mark.parametrize("num_layers", [40, 48])
def test_a_layer_count_copied_from_the_target(
    tmp_path: Path, target: ModelConfig, num_layers: int
) -> None:
    write_draft(tmp_path, config={"num_hidden_layers": num_layers})
    reading = inspect_draft(tmp_path, target)
    assert errors(reading) == [] and warnings(reading) == ["config-contradicted"]


def test_a_tied_flag_copied_from_the_target(tmp_path: Path, target: ModelConfig) -> None:
    write_draft(tmp_path, config={"tie_word_embeddings": True})
    reading = inspect_draft(tmp_path, target)
    assert errors(reading) == [] and warnings(reading) == ["config-contradicted"]
    assert reading.config is not None
    assert reading.config.has_head and not reading.config.decoder.tie_word_embeddings
    assert reading.config.draft_vocab_size == 97


@pytest.mark.parametrize("head_dim", [..., 16])
def test_head_dim_is_what_the_projections_show(
    tmp_path: Path, target: ModelConfig, head_dim: Any
) -> None:
    shape = DraftShape(hidden_size=80, head_dim=32, has_embedding=True)
    write_draft(tmp_path, shape, config={"head_dim": head_dim})
    reading = inspect_draft(tmp_path, target)
    assert reading.config is not None and reading.config.decoder.head_dim == 32
    assert warnings(reading) == ([] if head_dim is ... else ["config-contradicted"])


def test_the_target_vocabulary_does_not_size_the_head(tmp_path: Path, target: ModelConfig) -> None:
    write_draft(tmp_path, config={"draft_vocab_size": ...})
    assert read_draft_config(tmp_path, target).draft_vocab_size == 97


def test_a_full_vocabulary_needs_no_map(tmp_path: Path, target: ModelConfig) -> None:
    write_draft(tmp_path, DraftShape(draft_vocab_size=256, has_map=False))
    draft = read_draft_config(tmp_path, target)
    assert (draft.draft_vocab_size, draft.has_d2t) == (256, False)


def test_a_head_from_the_target(tmp_path: Path, target: ModelConfig) -> None:
    shape = DraftShape(has_head=False, has_map=False)
    write_draft(tmp_path, shape, config={"draft_vocab_size": None})
    draft = read_draft_config(tmp_path, target)
    assert (draft.has_head, draft.draft_vocab_size, draft.has_d2t) == (False, 256, False)
    assert not draft.decoder.tie_word_embeddings


def test_a_tied_head(tmp_path: Path, target: ModelConfig) -> None:
    shape = DraftShape(hidden_size=48, has_embedding=True, has_head=False, has_map=False)
    write_draft(tmp_path, shape, config={"draft_vocab_size": None, "tie_word_embeddings": True})
    draft = read_draft_config(tmp_path, target)
    assert draft.decoder.tie_word_embeddings and not draft.has_head and draft.has_embedding


@pytest.mark.parametrize("num_states", [1, 2, 4])
def test_other_numbers_of_states(tmp_path: Path, target: ModelConfig, num_states: int) -> None:
    ids = (2, 4, 6, 8)[-num_states:]
    shape = DraftShape(format="speculators", num_states=num_states, layer_ids=ids)
    write_draft(tmp_path, shape)
    draft = read_draft_config(tmp_path, target)
    assert draft.boundaries == ids and draft.num_features == num_states * 64


def test_boundaries_and_norm_output_can_be_given(tmp_path: Path, target: ModelConfig) -> None:
    write_draft(tmp_path, DraftShape(format="specforge", layer_ids=(1, 3, 4), norm_output=True))
    draft = read_draft_config(tmp_path, target, boundaries=(1, 2, 8), norm_output=False)
    assert draft.boundaries == (1, 2, 8) and not draft.norm_output
    assert draft.boundary_rule == "given by --draft-boundaries"
    draft = read_draft_config(tmp_path, target)
    assert draft.boundaries == (2, 4, 5) and "+1" in draft.boundary_rule and draft.norm_output


@pytest.mark.parametrize(
    ("format", "ids", "is_warned"),
    [
        ("safeailab", None, False),  # the format has no such field
        ("specforge", None, True),
        ("speculators", None, False),  # null is defined there
        ("specforge", (1, 3, 4), False),
        ("specforge", (0, 3, 6), True),
    ],
)
def test_guessing_is_told(
    tmp_path: Path, target: ModelConfig, format: Any, ids: Any, is_warned: bool
) -> None:
    write_draft(tmp_path, DraftShape(format=format, layer_ids=ids))
    reading = inspect_draft(tmp_path, target)
    assert ("boundaries-guessed" in warnings(reading)) == is_warned


def test_own_rope_with_scaling(tmp_path: Path, target: ModelConfig) -> None:
    shape = DraftShape(format="speculators", rope_theta=1e6, rope_scaling=YARN)
    write_draft(tmp_path, shape)
    rope = read_draft_config(tmp_path, target).decoder.rope
    assert (rope.theta, rope.kind, rope.factor) == (1e6, "yarn", 4.0)


def test_qwen3_layer(tmp_path: Path, target: ModelConfig) -> None:
    write_draft(tmp_path, DraftShape(format="speculators", qk_norm=True))
    assert read_draft_config(tmp_path, target).decoder.qk_norm


def test_biases_are_what_is_stored(tmp_path: Path, target: ModelConfig) -> None:
    write_draft(tmp_path, DraftShape(fc_bias=True), config={"attention_bias": True})
    reading = inspect_draft(tmp_path, target)
    assert warnings(reading) == ["config-contradicted"]
    assert reading.config is not None and reading.config.fc_bias
    assert not reading.config.decoder.qkv_bias


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": None, "use_sliding_window": False}, None),
        ({"sliding_window": 2048, "use_sliding_window": False}, None),
        ({"sliding_window": 2048}, 2048),
        ({"sliding_window": 2048, "layer_types": ["sliding_attention"]}, 2048),
        ({"sliding_window": 2048, "layer_types": ["full_attention"]}, None),
    ],
)
def test_sliding_window(
    tmp_path: Path, target: ModelConfig, changes: dict[str, Any], window: int | None
) -> None:
    write_draft(tmp_path, config=changes)
    assert read_draft_config(tmp_path, target).decoder.sliding_window == window


# (shape, changes of config.json, tensors not stored, error codes)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], list[str], list[str]]] = [
    ({}, {}, ["d2t", "t2d"], ["vocab-map-missing"]),
    ({}, {}, ["d2t"], ["vocab-map-missing"]),
    ({}, {}, ["lm_head.weight"], ["head-missing"]),
    ({"has_map": False}, {}, ["lm_head.weight"], ["head-missing"]),
    ({"hidden_size": 48}, {}, [], ["embedding-narrower"]),
    (
        {"hidden_size": 48, "has_embedding": True, "has_map": False},
        {"draft_vocab_size": None},
        ["lm_head.weight"],
        ["head-missing"],
    ),
    (
        {"has_embedding": True, "vocab_size": 200},
        {},
        [],
        ["embedding-too-short"],
    ),
    ({"target_hidden_size": 32}, {}, [], ["target-width"]),
    ({"target_hidden_size": 50}, {"target_hidden_size": ...}, [], ["fc-width"]),
    ({"num_states": 4}, {}, [], ["layer-ids-missing"]),
    ({"num_states": 4, "layer_ids": (1, 3, 4)}, {}, [], ["fc-width"]),
    ({"layer_ids": (1, 3, 40)}, {}, [], ["boundaries-out-of-range"]),
    ({"layer_ids": (3, 3, 4)}, {}, [], ["boundaries-repeated"]),
    ({"layer_ids": (4, 3, 1)}, {}, [], ["boundaries-not-ascending"]),
    ({"layer_ids": (1, 3)}, {}, [], ["fc-width"]),
    (
        {},
        {"hidden_size": ..., "rms_norm_eps": "x"},
        [],
        ["config-missing-key", "config-wrong-value"],
    ),
    ({}, {"hidden_act": "gelu"}, [], ["config-wrong-value"]),
    ({"norm_before_fc": True}, {"norm_before_fc": False}, [], ["draft-flags-disagree"]),
    ({"norm_before_fc": True, "fc_norm": True}, {}, [], ["draft-flags-disagree"]),
    ({}, {"norm_after_fc": True}, [], ["draft-option-unknown"]),
    ({}, {"residual_multiplier": 2.0}, [], ["draft-option-unknown"]),
    ({"format": "speculators"}, {"brand_new": 1}, [], ["draft-option-unknown"]),
    ({}, {"eagle_config": {"use_foo": True}}, [], ["draft-option-unknown"]),
    ({}, {"eagle_config": {"use_foo": False}}, [], ["draft-option-unknown"]),
    ({}, {"eagle_config": {"use_last_layernorm": False}}, [], ["draft-option-unsupported"]),
    ({}, {"eagle_config": {"parallel_draft_step": 2}}, [], ["draft-option-unsupported"]),
    ({}, {"rope_scaling": {"type": "longrope"}}, [], ["config-wrong-value"]),
    (
        {"format": "specforge", "layer_ids": (1, 3, 4)},
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
        [],
        ["draft-flags-disagree"],
    ),
]


@pytest.mark.parametrize(("shape", "config", "without", "codes"), REFUSED)
def test_refused(
    tmp_path: Path,
    target: ModelConfig,
    shape: dict[str, Any],
    config: dict[str, Any],
    without: list[str],
    codes: list[str],
) -> None:
    write_draft(tmp_path, DraftShape(**shape), config=config, without=without)
    reading = inspect_draft(tmp_path, target)
    assert errors(reading) == codes
    with pytest.raises(CheckError):
        read_draft_config(tmp_path, target)


@pytest.mark.parametrize("note", [{"unsloth_version": "1"}, {"norm_after_fc": False}])
def test_notes_are_left_alone(tmp_path: Path, target: ModelConfig, note: dict[str, Any]) -> None:
    write_draft(tmp_path, config=note)
    assert errors(inspect_draft(tmp_path, target)) == []


@pytest.mark.parametrize("format", FORMATS)
def test_without_weight_files(tmp_path: Path, target: ModelConfig, format: Any) -> None:
    write_config(tmp_path, draft_config(DraftShape(format=format)))
    reading = inspect_draft(tmp_path, target)
    skipped = [f.code for f in reading.findings if f.severity is Severity.SKIPPED]
    assert errors(reading) == [] and skipped == ["weights-missing"]
    assert reading.config is not None and reading.config.draft_vocab_size == 97
    assert reading.config.has_d2t and reading.config.has_head


def test_without_a_target(tmp_path: Path) -> None:
    write_draft(tmp_path, config={"norm_after_fc": True})
    reading = inspect_draft(tmp_path, None)
    assert errors(reading) == ["draft-option-unknown"] and reading.config is None


@pytest.mark.parametrize("text", [None, "nonsense"])
def test_unreadable(tmp_path: Path, target: ModelConfig, text: str | None) -> None:
    write_draft(tmp_path)
    (tmp_path / "config.json").unlink()
    if text:
        (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert errors(inspect_draft(tmp_path, target)) == ["weights-broken", "config-unreadable"]
    assert errors(inspect_draft(tmp_path / "none", target)) == ["draft-not-found"]


def test_quantization_is_named(tmp_path: Path, target: ModelConfig) -> None:
    layer = {"quantization_config": {"quant_method": "compressed-tensors"}}
    shape = DraftShape(format="speculators")
    layer |= draft_config(shape)["transformer_layer_config"]
    write_draft(tmp_path, shape, config={"transformer_layer_config": layer})
    assert read_draft_config(tmp_path, target).decoder.quantization == "compressed-tensors"


def test_a_config_of_another_vocabulary_is_told(tmp_path: Path, target: ModelConfig) -> None:
    write_draft(tmp_path, config={"vocab_size": 300})
    assert warnings(inspect_draft(tmp_path, target)) == ["vocab-size-differs"]


def test_the_fixture_is_what_the_format_stores(tmp_path: Path) -> None:
    write_draft(tmp_path, DraftShape(format="speculators"))
    data = json.loads((tmp_path / "config.json").read_text())
    assert "hidden_size" not in data and data["transformer_layer_config"]["hidden_size"] == 64
