"""The vision part of a config.json and of the preprocessor's file, in both spellings; names."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.kimi_k25 import TARGET, write_kimi
from fixtures.kimi_vision import PUBLISHED_VISION, VISION, write_kimi_vision

from eyas.models.config import ModelConfig, VisionConfig
from eyas.models.kimi_k25 import published_name
from eyas.models.target_config import read_target_config
from eyas.types import CheckError

PUBLISHED = {
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "merge_kernel_size": [2, 2],
    "video_attn_type": "spatial_temporal",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 1152,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 7168,
}
MEDIA = {
    "in_patch_limit": 16384,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096,
    "sample_fps": 2.0,
    "timestamp_mode": "hh:mm:ss.fff",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}


def write(folder: Path, vision: Any, **outer: Any) -> Path:
    """Kimi-K2.5's config.json with another vision part."""
    write_kimi(folder)
    path = folder / "target/config.json"
    path.write_text(json.dumps(TARGET | {"vision_config": vision} | outer))
    return folder / "target"


def read(folder: Path, vision: Any, **outer: Any) -> VisionConfig | None:
    return read_target_config(write(folder, vision, **outer)).vision


def preprocessor(folder: Path, data: Any, name: str = "preprocessor_config.json") -> None:
    (folder / "target" / name).write_text(json.dumps(data))


def test_the_published_file_is_the_default(tmp_path: Path) -> None:
    assert read(tmp_path, PUBLISHED) == VisionConfig()
    preprocessor(tmp_path, {"media_proc_cfg": MEDIA, "auto_map": {}})
    assert read(tmp_path, PUBLISHED, media_placeholder_token_id=163605) == VisionConfig()
    assert read(tmp_path, {}) is None and read(tmp_path, None) is None


def test_both_spellings_are_one(tmp_path: Path) -> None:
    vision = read(tmp_path, PUBLISHED_VISION, media_placeholder_token_id=7)
    assert vision == read(tmp_path, VISION, image_token_id=7)
    assert vision == VisionConfig(
        num_layers=3,
        hidden_size=24,
        intermediate_size=40,
        num_heads=2,
        patch_size=4,
        grid_size=(6, 6),
        placeholder_id=7,
    )
    sizes = {"rope_parameters": {"rope_theta": 500.0}, "pos_emb_width": 9, "merge_kernel_size": 3}
    other = read(tmp_path, VISION | sizes, projection_layer_norm_eps=1e-6)
    assert other is not None and (other.rope_theta, other.norm_eps) == (500.0, 1e-6)
    assert (other.grid_size, other.merge_size) == ((6, 9), 3)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("preprocessor_config.json", {"media_proc_cfg": MEDIA | {"in_patch_limit": 100}}),
        ("preprocessor_config.json", {"max_patches": 100, "size": {"max_height": 512}}),
        ("processor_config.json", {"image_processor": {"max_patches": 100, "merge_size": 2}}),
    ],
)
def test_limits_come_from_the_preprocessor(tmp_path: Path, name: str, data: Any) -> None:
    write(tmp_path, PUBLISHED)
    preprocessor(tmp_path, data, name)
    assert read(tmp_path, PUBLISHED) == VisionConfig(max_patches=100)
    colours = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 1]}
    preprocessor(tmp_path, {"media_proc_cfg": MEDIA | colours | {"patch_limit_on_one_side": 8}})
    assert read(tmp_path, PUBLISHED) == VisionConfig(
        mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 1.0), max_side_patches=8
    )


@pytest.mark.parametrize(
    ("vision", "media", "word"),
    [
        ({"merge_type": "other"}, {}, "merge_type must be sd2_tpool"),
        ({"mm_projector_type": "mlp"}, {}, "mm_projector_type must be patchmerger"),
        ({"pos_emb_type": "learned"}, {}, "pos_emb_type must be divided_fixed"),
        ({"hidden_act": "relu"}, {}, "hidden_act must be gelu_pytorch_tanh"),
        ({"vt_hidden_size": 1153}, {}, "no multiple of 4 × 16 heads"),
        ({"vt_num_hidden_layers": "many"}, {}, "vt_num_hidden_layers must be a whole number"),
        ({"merge_kernel_size": [2, 3]}, {}, "merge_kernel_size must be a number or two equal"),
        ({"rope_parameters": {"rope_theta": "10"}}, {}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"rope_type": "yarn"}}, {}, "rope_type must be axial, not 'yarn'"),
        ({}, {"patch_size": 16}, "patch_size must be 14, as in config.json"),
        ({}, {"merge_kernel_size": 3}, "merge_kernel_size must be 2, as in config.json"),
        ({}, {"image_std": [0.5, 0, 0.5]}, "image_std must be three numbers"),
        ({}, {"image_mean": 0.5}, "image_mean must be three numbers"),
        ({}, {"fixed_output_tokens": 256}, "fixed_output_tokens is not supported"),
        ({}, {"in_patch_limit": 0}, "in_patch_limit must be a whole number"),
    ],
)
def test_what_would_give_other_numbers_is_refused(
    tmp_path: Path, vision: Any, media: Any, word: str
) -> None:
    write(tmp_path, PUBLISHED | vision)
    preprocessor(tmp_path, {"media_proc_cfg": MEDIA | media})
    with pytest.raises(CheckError, match="vision_config") as caught:
        read_target_config(tmp_path / "target")
    assert word in str(caught.value)


def test_a_placeholder_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="163840 is outside the vocabulary of 163840"):
        read(tmp_path, PUBLISHED, media_placeholder_token_id=163840)


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    configs: list[ModelConfig] = []
    for layout in ("saved", "published"):
        write_kimi_vision(tmp_path / layout, layout)
        configs.append(read_target_config(tmp_path / layout))
    assert configs[0].vision == configs[1].vision is not None


@pytest.mark.parametrize(
    ("stored", "published"),
    [
        ("language_model.model.layers.3.mlp.gate.weight", None),
        ("language_model.lm_head.weight", None),
        ("vision_tower.encoder.blocks.3.wqkv.bias", None),
        ("mm_projector.proj.2.weight", None),
        ("lm_head.weight", "language_model.lm_head.weight"),
        (
            "language_model.layers.3.mlp.gate.weight",
            "language_model.model.layers.3.mlp.gate.weight",
        ),
        ("language_model.norm.weight", "language_model.model.norm.weight"),
        ("model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("language_model.model.blocks.3.mlp.x", "language_model.model.layers.3.mlp.x"),
        ("model.mm_projector.pre_norm.bias", "mm_projector.pre_norm.bias"),
        ("model.mm_projector.in_proj.bias", "mm_projector.proj.0.bias"),
        ("model.vision_tower.layers.7.norm1.bias", "vision_tower.encoder.blocks.7.norm0.bias"),
        ("model.vision_tower.layers.7.norm2.bias", "vision_tower.encoder.blocks.7.norm1.bias"),
        (
            "model.vision_tower.layers.7.attn.k_proj.bias",
            "vision_tower.encoder.blocks.7.attn.k_proj.bias",
        ),
        (
            "vision_tower.encoder.patch_embed.proj.bias",
            "vision_tower.patch_embed.proj.bias",
        ),
    ],
)
def test_names(stored: str, published: str | None) -> None:
    assert published_name(stored) == (published or stored)
