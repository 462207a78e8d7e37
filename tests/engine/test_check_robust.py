"""Whatever a config.json says, the check answers with findings and never with a traceback."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import DraftShape, write_draft, write_target
from fixtures.kimi_k25 import write_kimi
from fixtures.kimi_vision import PUBLISHED_VISION
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.config import EngineConfig
from eyas.engine.check import run_check

FOLDERS: list[Any] = ["target", "safeailab", "specforge", "speculators"]
KEYS = [
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "rope_theta"),
    *("rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings"),
    *("rms_norm_eps", "hidden_act", "torch_dtype", "dtype", "tie_word_embeddings", "eagle_config"),
    *("architectures", "model_type", "speculators_model_type", "transformer_layer_config"),
    *("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "target_hidden_size"),
    *("sliding_window", "layer_types", "use_sliding_window", "quantization_config"),
    *("eos_token_id", "norm_before_fc", "fc_norm", "norm_output", "bias", "attention_bias"),
]
SCALINGS = st.fixed_dictionaries(
    {"type": st.sampled_from(["linear", "dynamic", "yarn", "llama3", "default", "x", 1])},
    optional={"factor": st.sampled_from([2, 0.5, None, "a"]), "truncate": st.just(3)},
)
VALUES = (
    st.sampled_from([None, True, False, 0, -1, 1, 2, 3, 7, 1.5, 1e30, 10**20, "x", "", [], {}])
    | st.sampled_from([[1], ["a"], [None], {"a": 1}, {"a": {"b": 1}}, [[1]]])
    | SCALINGS
)


# Sizes with which Kimi-K2.5's configuration is checked in a few hundredths of a second.
SMALL = {"num_hidden_layers": 4, "hidden_size": 64, "moe_intermediate_size": 64}
SMALL |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2}
MEDIA = {"in_patch_limit": 256, "patch_limit_on_one_side": 32, "merge_kernel_size": 2}
MEDIA |= {"patch_size": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
VISION = PUBLISHED_VISION | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "axial"}}
# Where its keys are: (file, way there).
SECTIONS: list[tuple[str, tuple[str, ...]]] = [
    ("config", ()),
    ("config", ("text_config",)),
    ("config", ("text_config", "rope_scaling")),
    ("config", ("vision_config",)),
    ("config", ("vision_config", "rope_parameters")),
    ("config", ("text_config", "quantization_config")),
    ("config", ("text_config", "quantization_config", "config_groups", "group_0")),
    ("config", ("text_config", "quantization_config", "config_groups", "group_0", "weights")),
    ("preprocessor_config", ("media_proc_cfg",)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Folder and good config.json by name."""
    found = {}
    for name in FOLDERS:
        folder = tmp_path_factory.mktemp(name)
        if name == "target":
            write_target(folder)
        else:
            write_draft(folder, DraftShape(format=name, layer_ids=(1, 3, 4)))
        found[name] = folder, json.loads((folder / "config.json").read_text())
    return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(FOLDERS),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3),
    is_nested=st.booleans(),
)
def test_any_config_gets_an_answer(
    folders: dict[str, tuple[Path, dict[str, Any]]],
    name: str,
    changes: dict[str, Any],
    is_nested: bool,
) -> None:
    folder, good = folders[name]
    changed = {**good, **changes}
    if is_nested and name == "speculators":
        layer = {**good["transformer_layer_config"], **changes}
        changed = {**good, "transformer_layer_config": layer}
    draft = "specforge" if name == "target" else name
    config = EngineConfig(
        model=str(folders["target"][0]), draft=str(folders[draft][0]), device="cpu"
    )
    (folder / "config.json").write_text(json.dumps(changed))
    try:
        report = run_check(config, budget_bytes=1 << 34)
    finally:
        (folder / "config.json").write_text(json.dumps(good))
    json.loads(report.to_json())
    # A fault of the engine is nothing that a config may bring about.
    assert "capture-wrong" not in {finding.code for finding in report.findings}
    assert report.ok or all(finding.message for finding in report.findings)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A folder without weights, and what is right in each of its files."""
    folder = tmp_path_factory.mktemp("kimi")
    write_kimi(folder, None, **SMALL)
    config = json.loads((folder / "target/config.json").read_text())
    config |= {"vision_config": VISION, "media_placeholder_token_id": 60}
    return folder / "target", {"config": config, "preprocessor_config": {"media_proc_cfg": MEDIA}}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(section=st.sampled_from(SECTIONS), value=VALUES, which=st.integers(0, 99))
def test_any_configuration_of_kimi_gets_an_answer(
    kimi: tuple[Path, dict[str, dict[str, Any]]],
    section: tuple[str, tuple[str, ...]],
    value: Any,
    which: int,
) -> None:
    folder, good = kimi
    name, way = section
    files = copy.deepcopy(good)
    found: dict[str, Any] = files[name]
    for key in way:
        found = found[key]
    found[sorted(found)[which % len(found)]] = value
    for file, data in files.items():
        (folder / f"{file}.json").write_text(json.dumps(data))
    config = EngineConfig(model=str(folder), device="cpu", tensor_parallel_size=2)
    report = run_check(config, budget_bytes=1 << 34)
    json.loads(report.to_json())
    assert "capture-wrong" not in {finding.code for finding in report.findings}
