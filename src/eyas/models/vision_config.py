"""The vision part of a config.json, and how images are prepared, from preprocessor_config.json.

Both are read in the published spelling (Kimi-K2.5: `vt_hidden_size`, `media_proc_cfg`) and in that
of transformers 5 (`hidden_size`, `max_patches`). Defaults of absent keys are the published values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import ModelConfig, VisionConfig
from eyas.models.config_file import Fields, read_json
from eyas.models.findings import Findings
from eyas.models.vision_names import stored_vision
from eyas.types import EyasError

_DEFAULT = VisionConfig()
# What the tower can be: anything else would give other numbers.
_ONLY = {
    "pos_emb_type": "divided_fixed",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "hidden_act": "gelu_pytorch_tanh",
}
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")


def read_vision(top: Fields, folder: Path, *, vocab_size: int) -> VisionConfig | None:
    """The vision part of a wrapper's config.json; None where the file has none.

    Adds to `top` what is wrong in it or in the preprocessor's file.
    """
    section = top.section("vision_config")
    if not section:
        return None
    fields = Fields(section, where="vision_config", subject=top.subject)
    for key, only in _ONLY.items():
        if fields.text(key, only) != only:
            fields.problems.append(f"{key} must be {only}, not {section[key]!r}")
    rope = Fields(fields.section("rope_parameters"), where="rope_parameters", subject=top.subject)
    if rope.text("rope_type", "axial") not in ("axial", "default"):
        rope.problems.append(f"rope_type must be axial, not {rope.data['rope_type']!r}")
    theta = rope.number("rope_theta", _DEFAULT.rope_theta)
    fields.problems += [f"rope_parameters.{problem}" for problem in rope.problems]
    eps = fields.number("projector_ln_eps", top.number("projection_layer_norm_eps", 1e-5))
    token = top.integer("image_token_id", _DEFAULT.placeholder_id, least=0)
    vision = VisionConfig(
        num_layers=_either(fields, "num_hidden_layers", _DEFAULT.num_layers),
        hidden_size=_either(fields, "hidden_size", _DEFAULT.hidden_size),
        intermediate_size=_either(fields, "intermediate_size", _DEFAULT.intermediate_size),
        num_heads=_either(fields, "num_attention_heads", _DEFAULT.num_heads),
        patch_size=fields.integer("patch_size", _DEFAULT.patch_size),
        merge_size=_square(fields, "merge_kernel_size", _DEFAULT.merge_size),
        grid_size=(_grid(fields, "height"), _grid(fields, "width")),
        rope_theta=theta,
        norm_eps=eps,
        placeholder_id=top.integer("media_placeholder_token_id", token, least=0),
    )
    if vision.hidden_size % (4 * vision.num_heads):
        fields.problems.append(
            f"hidden_size {vision.hidden_size} is no multiple of 4 × {vision.num_heads} heads"
        )
    if vision.placeholder_id >= vocab_size:
        fields.problems.append(
            f"media_placeholder_token_id {vision.placeholder_id} is outside the vocabulary of "
            f"{vocab_size}"
        )
    vision = _with_preprocessor(vision, fields, folder)
    top.problems += [f"vision_config.{problem}" for problem in fields.problems]
    return vision


def _either(fields: Fields, key: str, default: int) -> int:
    """A size under its published name, `vt_…`, or under its plain one."""
    published = f"vt_{key}"
    return fields.integer(published if published in fields else key, default)


def _grid(fields: Fields, side: str) -> int:
    published = f"init_pos_emb_{side}"
    key = published if published in fields else f"pos_emb_{side}"
    return fields.integer(key, _DEFAULT.grid_size[0])


def _square(fields: Fields, key: str, default: int) -> int:
    """A number, or a list of two equal ones."""
    value = fields.data.get(key)
    sides = value if isinstance(value, list) else [default if value is None else value]
    if not sides or any(type(side) is not int or side < 1 or side != sides[0] for side in sides):
        fields.problems.append(f"{key} must be a number or two equal ones, not {value!r}")
        return default
    return int(sides[0])


def _with_preprocessor(vision: VisionConfig, fields: Fields, folder: Path) -> VisionConfig:
    """With the limits and colours that the preprocessor's file says, if there is one."""
    for name in _PREPROCESSORS:
        if not (folder / name).exists():
            continue
        try:
            data = read_json(folder / name)
        except EyasError as error:
            fields.problems.append(str(error))
            return vision
        for section in ("media_proc_cfg", "image_processor"):
            if isinstance(data.get(section), dict):
                data = data[section]
        own = Fields(data, where=name, subject=fields.subject)
        changes = dict(_preprocessing(own, vision))
        fields.problems += [f"{name}: {problem}" for problem in own.problems]
        return dataclasses.replace(vision, **changes)
    return vision


def _preprocessing(fields: Fields, vision: VisionConfig) -> Iterator[tuple[str, Any]]:
    patches = fields.integer("max_patches", vision.max_patches)
    yield "max_patches", fields.integer("in_patch_limit", patches)
    size = fields.section("size")
    sides = Fields(size, where="size", subject=fields.subject)
    side = sides.integer("max_height", vision.max_side_patches)
    fields.problems += sides.problems
    yield "max_side_patches", fields.integer("patch_limit_on_one_side", side)
    for key in ("mean", "std"):
        yield key, _colours(fields, f"image_{key}", getattr(vision, key))
    if fields.integer("patch_size", vision.patch_size) != vision.patch_size:
        fields.problems.append(f"patch_size must be {vision.patch_size}, as in config.json")
    key = "merge_kernel_size" if "merge_kernel_size" in fields else "merge_size"
    if _square(fields, key, vision.merge_size) != vision.merge_size:
        fields.problems.append(f"{key} must be {vision.merge_size}, as in config.json")
    if "fixed_output_tokens" in fields:
        fields.problems.append("fixed_output_tokens is not supported: leave it out")


def _colours(fields: Fields, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = fields.data.get(key)
    if value is None:
        return default
    is_list = isinstance(value, list) and len(value) == 3
    least = 0.001 if key == "image_std" else 0
    if not is_list or any(type(v) not in (int, float) or not least <= v <= 1 for v in value):
        fields.problems.append(f"{key} must be three numbers from {least} to 1, not {value!r}")
        return default
    return tuple(float(v) for v in value)


def with_stored_vision(
    config: ModelConfig, checkpoint: Checkpoint | None, findings: Findings
) -> ModelConfig:
    """The same model as far as its checkpoint can see: without a tower whose weights it lacks
    (a warning), and with rotated pairs in the order in which they are stored."""
    if config.vision is None or checkpoint is None:
        return config
    stored = stored_vision(checkpoint.tensors)
    if not stored:
        findings.warn(
            "target",
            "vision-weights-missing",
            f"{checkpoint.folder} has a vision_config and no weights of the vision tower: text "
            "is served, requests with images are refused",
            "get the whole checkpoint to serve images, or set --no-images to say so openly",
        )
        return dataclasses.replace(config, vision=None)
    halves = any(name.startswith("vision_tower.layers.") for name in stored)
    return dataclasses.replace(config, vision=dataclasses.replace(config.vision, halves=halves))


def without_vision(config: ModelConfig) -> ModelConfig:
    """The same model for text alone."""
    return dataclasses.replace(config, vision=None)
