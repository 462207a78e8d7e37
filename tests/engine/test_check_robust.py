"""Whatever a config.json says, the check answers with findings and never with a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import DraftShape, write_draft, write_target
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
