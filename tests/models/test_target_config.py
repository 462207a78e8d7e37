"""Reading a target's config.json: defaults as transformers has them, and everything refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import TargetShape, target_config, write_config

from eyas.models.config import RopeConfig
from eyas.models.target_config import position_limit, read_target_config
from eyas.types import CheckError, EyasError

FAMILIES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def write(folder: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> Path:
    write_config(folder, target_config(TargetShape(architecture=architecture)), changes)
    return folder


def codes(error: CheckError) -> list[str]:
    return [finding.code for finding in error.findings]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("is_bare", [False, True])
def test_reads_what_transformers_reads(tmp_path: Path, architecture: str, is_bare: bool) -> None:
    from transformers import AutoConfig

    bare = dict.fromkeys(
        ["head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"]
        + ["rope_theta", "tie_word_embeddings", "eos_token_id", "bos_token_id", "torch_dtype"],
        ...,
    )
    # 32 heads, so that the families' default of 32 key/value heads fits.
    changes = bare | {"num_attention_heads": 32} if is_bare else {}
    folder = write(tmp_path, architecture, **changes)
    ours, theirs = read_target_config(folder), AutoConfig.from_pretrained(folder)
    eos = theirs.eos_token_id
    assert ours == dataclasses.replace(
        ours,
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_layers=theirs.num_hidden_layers,
        num_heads=theirs.num_attention_heads,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // 32,
        vocab_size=theirs.vocab_size,
        rms_norm_eps=theirs.rms_norm_eps,
        max_position_embeddings=theirs.max_position_embeddings,
        tie_word_embeddings=theirs.tie_word_embeddings,
        rope=RopeConfig(theta=theirs.rope_parameters["rope_theta"]),
        eos_token_ids=() if eos is None else (eos,),
        bos_token_id=theirs.bos_token_id,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "o_bias"),
    [
        ("LlamaForCausalLM", True, True),
        ("Qwen2ForCausalLM", True, False),
        ("Qwen3ForCausalLM", True, True),
    ],
)
def test_attention_bias(tmp_path: Path, architecture: str, qkv_bias: bool, o_bias: bool) -> None:
    config = read_target_config(write(tmp_path, architecture, attention_bias=True, mlp_bias=True))
    assert (config.qkv_bias, config.o_bias) == (qkv_bias, o_bias)
    assert config.mlp_bias == (architecture == "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": ...}, RopeConfig(theta=10000.0)),
        ({"rope_scaling": None, "rope_theta": 7.0}, RopeConfig(theta=7.0)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(kind="linear", factor=2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4}},
            RopeConfig(kind="dynamic", factor=4.0),
        ),
        (
            {"rope_scaling": LLAMA3, "rope_theta": 5e5},
            RopeConfig(
                theta=5e5,
                kind="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=256,
            ),
        ),
        (  # transformers 5
            {
                "rope_theta": ...,
                "rope_parameters": {"rope_type": "default", "rope_theta": 3e5},
            },
            RopeConfig(theta=3e5),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 16, "truncate": False}},
            RopeConfig(
                kind="yarn",
                factor=4.0,
                original_max_position_embeddings=512,
                beta_fast=16.0,
                truncate=False,
            ),
        ),
        (  # without a factor, the two lengths give it
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 128}},
            RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=128),
        ),
        ({"partial_rotary_factor": 0.5}, RopeConfig(partial=0.5)),
    ],
)
def test_rope(tmp_path: Path, changes: dict[str, Any], expected: RopeConfig) -> None:
    assert read_target_config(write(tmp_path, **changes)).rope == expected


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "longrope", "factor": 2.0}, "longrope"),
        ({"type": "linear"}, "rope_scaling.factor"),
        ({"type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha"),
        ({"type": "yarn", "factor": 4.0, "mrope_section": [1]}, "mrope_section"),
        ({"type": "llama3", "factor": -1.0}, "low_freq_factor"),
        ({"full_attention": {"rope_theta": 1.0}}, "layer type"),
        ({"type": "yarn", "factor": 4.0, "rope_theta": 1}, "rope_theta must be above 1"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor must be above"),
    ],
)
def test_rope_that_would_be_computed_wrongly(
    tmp_path: Path, scaling: dict[str, Any], words: str
) -> None:
    with pytest.raises(EyasError, match=words):
        read_target_config(write(tmp_path, rope_scaling=scaling))


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (None, 512),
        (LLAMA3, 512),
        ({"type": "linear", "factor": 2.0}, 1024),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_position_limit(tmp_path: Path, scaling: dict[str, Any] | None, limit: int) -> None:
    assert position_limit(read_target_config(write(tmp_path, rope_scaling=scaling))) == limit


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "merged"),
    [
        (2, 2, (2,)),
        (2, [7, 2, 9], (2, 7, 9)),
        ([5, 4], None, (5, 4)),
        (None, 3, (3,)),
        (-1, 3, (3,)),
        (..., ..., (2,)),  # the family's default
    ],
)
def test_end_tokens_of_both_files(
    tmp_path: Path, config_eos: Any, generation_eos: Any, merged: tuple[int, ...]
) -> None:
    write(tmp_path, eos_token_id=config_eos)
    if generation_eos is not ...:
        generation = {"eos_token_id": generation_eos}
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_target_config(tmp_path).eos_token_ids == merged


def test_all_missing_and_wrong_keys_come_together(tmp_path: Path) -> None:
    write(
        tmp_path,
        hidden_size=...,
        vocab_size=...,
        num_attention_heads="4",
        rms_norm_eps=True,
        hidden_act="gelu",
    )
    with pytest.raises(CheckError) as raised:
        read_target_config(tmp_path)
    assert codes(raised.value) == ["config-missing-key", "config-wrong-value"]
    text = str(raised.value)
    for word in ("hidden_size", "vocab_size", "num_attention_heads", "rms_norm_eps", "gelu"):
        assert word in text


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 3},
        {"head_dim": ..., "hidden_size": 66},
        {"head_dim": 15},
        {"partial_rotary_factor": 1.5},
        {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"torch_dtype": "int8"},
        {"eos_token_id": "</s>"},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**6},
        {"hidden_size": 10**20},
        {"rope_theta": float("inf")},
    ],
)
def test_values_that_cannot_be(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckError) as raised:
        read_target_config(write(tmp_path, **changes))
    assert codes(raised.value) == ["config-wrong-value"]


def test_unknown_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckError) as raised:
        read_target_config(write(tmp_path, architectures=["LlamaForCausaLM"]))
    (finding,) = raised.value.findings
    assert finding.code == "unsupported-architecture"
    for name in ("LlamaForCausaLM", *FAMILIES):
        assert name in finding.message
    assert "LlamaForCausalLM" in finding.hint


def test_a_draft_given_as_target_is_told(tmp_path: Path) -> None:
    write(tmp_path, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=97)
    with pytest.raises(CheckError, match="--draft"):
        read_target_config(tmp_path)


def test_model_type_stands_in_for_a_missing_architecture(tmp_path: Path) -> None:
    config = read_target_config(write(tmp_path, "Qwen3ForCausalLM", architectures=...))
    assert config.architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is missing"),
        ("{", "not valid JSON"),
        ("[]", "instead of an object"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    ],
)
def test_unreadable_config(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(EyasError, match=words):
        read_target_config(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="not a folder"):
        read_target_config(tmp_path / "nowhere")


def test_quantization_is_named(tmp_path: Path) -> None:
    assert read_target_config(write(tmp_path / "plain")).quantization is None
    folder = write(tmp_path / "fp8", quantization_config={"quant_method": "fp8"})
    assert read_target_config(folder).quantization == "fp8"
    folder = write(tmp_path / "nvfp4")
    hf_quant_config = {"quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config))
    assert read_target_config(folder).quantization == "modelopt NVFP4"
    (folder / "hf_quant_config.json").write_text("{")
    with pytest.raises(CheckError, match=r"hf_quant_config\.json is not valid JSON"):
        read_target_config(folder)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 64}, None),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, 64),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 8}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64),
    ],
)
def test_sliding_window(tmp_path: Path, changes: dict[str, Any], window: int | None) -> None:
    assert (
        read_target_config(write(tmp_path, "Qwen2ForCausalLM", **changes)).sliding_window == window
    )
