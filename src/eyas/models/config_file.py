"""Typed reading of a config.json: every key that is missing or of a wrong kind is a finding.

Raw JSON, without transformers: the check has to be quick, and must see what the file says and not
what a configuration class made of it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.models.config import ModelConfig, RopeConfig
from eyas.models.findings import Findings
from eyas.types import EyasError

LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
ROPE_KEYS: dict[str, dict[str, bool]] = {  # key: whether it is required
    "default": {},
    "linear": {"factor": True},
    "dynamic": {"factor": True},
    "llama3": {
        "factor": True,
        "low_freq_factor": True,
        "high_freq_factor": True,
        "original_max_position_embeddings": False,
    },
    "yarn": {
        "factor": False,
        "original_max_position_embeddings": False,
        "attention_factor": False,
        "beta_fast": False,
        "beta_slow": False,
        "mscale": False,
        "mscale_all_dim": False,
        "truncate": False,
    },
}
_NEUTRAL_ROPE_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"}
MAX_SIZE = 2**31 - 1
_PLAIN_DTYPES = ("float32", "bfloat16", "float16")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises EyasError that names the file."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise EyasError(f"{path} is missing") from None
    except OSError as error:
        raise EyasError(f"{path} cannot be read: {error}") from None
    if raw.startswith(LFS_PREFIX):
        raise EyasError(f"{path} is a Git-LFS pointer and not the file: run `git lfs pull`")
    if raw.startswith(codecs.BOM_UTF8):  # json would take it; transformers' tokenizers do not
        raise EyasError(f"{path} begins with a byte order mark: save it as UTF-8 without one")
    try:
        data = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise EyasError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise EyasError(f"{path} holds a {type(data).__name__} instead of an object")
    return data


class Fields:
    """Typed access to one JSON object; null counts as absent.

    A getter without a default is for a required key. Problems are kept, and a harmless value is
    returned in place, so that all of them are found in one pass; `report` hands them over and
    starts anew.
    """

    def __init__(self, data: Mapping[str, Any], *, where: str, subject: str) -> None:
        self.data = data
        self.where = where
        self.subject = subject
        self.missing: list[str] = []
        self.problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def _absent(self, name: str, default: Any, placeholder: Any) -> Any:
        if default is not None:
            return default
        self.missing.append(name)
        return placeholder

    def integer(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        """A whole number between `least` and `most`."""
        value = self.data.get(name)
        if value is None:
            found: int = self._absent(name, default, max(least, 1))
            return found
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= most:
            self.problems.append(
                f"{name} must be a whole number between {least} and {most}, not {value!r}"
            )
            return max(least, 1)
        return value

    def optional_integer(self, name: str, *, least: int = 1) -> int | None:
        """A whole number from `least` up, or None when the key is absent."""
        return self.integer(name, least=least) if name in self else None

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number, not above 1e18."""
        value = self.data.get(name)
        if value is None:
            found: float = self._absent(name, default, 1.0)
            return found
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e18:
            self.problems.append(f"{name} must be a positive number, not {value!r}")
            return 1.0
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{name} must be true or false, not {value!r}")
            return default
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.problems.append(f"{name} must be a string, not {value!r}")
            return default
        return value

    def section(self, name: str) -> dict[str, Any]:
        """A nested object; empty when absent."""
        value = self.data.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.problems.append(f"{name} must be an object, not {value!r}")
            return {}
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them. Negative ids stand for "none" in some files."""
        value = self.data.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            self.problems.append(f"{name} must be a token id or a list of them, not {value!r}")
            return ()
        return tuple(dict.fromkeys(v for v in values if v >= 0))

    def report(self, findings: Findings) -> None:
        """Add one finding with all missing keys and one with all wrong values."""
        if self.missing:
            names = ", ".join(dict.fromkeys(self.missing))
            findings.error(
                self.subject,
                "config-missing-key",
                f"{self.where} lacks {names}",
                "add the key(s), or take the config.json that belongs to the weights",
            )
        if self.problems:
            findings.error(
                self.subject,
                "config-wrong-value",
                f"{self.where}: " + "; ".join(dict.fromkeys(self.problems)),
            )
        self.missing, self.problems = [], []


def read_dtype(fields: Fields) -> str | None:
    """The checkpoint's dtype by name: `dtype` (transformers 5) or `torch_dtype`; None if absent."""
    given = fields.text("dtype", fields.text("torch_dtype", ""))
    name = given.removeprefix("torch.")
    if name != given and fields.subject == "target":
        fields.problems.append(
            f"dtype must be {name!r}, not {given!r}: transformers, which reads it beside the "
            "tokenizer, fails on it"
        )
    if name and name not in _PLAIN_DTYPES:
        fields.problems.append(f"dtype must be one of {', '.join(_PLAIN_DTYPES)}, not {name!r}")
    return name or None


def read_quantization(fields: Fields, folder: Path) -> str | None:
    """The quantization method that the files name, None when the weights are plain."""
    for key in ("quantization_config", "compression_config"):
        section = fields.section(key)
        if section:
            return str(section.get("quant_method") or section.get("quant_algo") or key)
    path = folder / "hf_quant_config.json"  # NVIDIA ModelOpt
    if not path.exists():
        return None
    try:
        inner = Fields(read_json(path), where=path.name, subject=fields.subject)
    except EyasError as error:
        fields.problems.append(str(error))
        return None
    return f"modelopt {inner.section('quantization').get('quant_algo', '')}".strip()


def read_rope(fields: Fields, *, max_positions: int) -> RopeConfig:
    """Rotary embedding from `rope_scaling` (`type` or `rope_type`) or, as transformers 5 writes
    it, `rope_parameters`; `rope_theta` from there, else from the top level, else 10000.

    A kind or a key that would change the rotation and is not known is a problem, never ignored.
    """
    name = "rope_scaling" if fields.section("rope_scaling") else "rope_parameters"
    raw = fields.section(name)
    if any(isinstance(value, dict) for value in raw.values()):
        fields.problems.append(f"{name} differs by layer type, which is not supported")
        return RopeConfig()
    inner = Fields(raw, where=name, subject=fields.subject)
    kind = inner.text("rope_type", inner.text("type", "default"))
    keys = ROPE_KEYS.get(kind)
    if keys is None:
        fields.problems.append(
            f"{name} has the type {kind!r}; supported are {', '.join(sorted(ROPE_KEYS))}"
        )
        return RopeConfig()
    unknown = [k for k in raw if k not in keys and k not in _NEUTRAL_ROPE_KEYS and k in inner]
    # transformers reads neither key for these kinds, and many files carry them.
    harmless = {"factor", "original_max_position_embeddings"}
    unknown = [k for k in unknown if k not in harmless]
    if unknown:
        fields.problems.append(f"{name} of type {kind} has unknown keys: {', '.join(unknown)}")
    values: dict[str, Any] = {}
    for key, required in keys.items():
        if key not in inner and not required:
            continue
        is_flag, is_count = key == "truncate", key.startswith("original")
        read = inner.integer if is_count else inner.number
        values[key] = inner.flag(key, True) if is_flag else read(key)
    if kind in ("llama3", "yarn"):
        # A value outside the section wins, as in transformers; without any, the model was not
        # extended and its own limit is the original one.
        original = fields.optional_integer("original_max_position_embeddings")
        original = original or values.get("original_max_position_embeddings") or max_positions
        values["original_max_position_embeddings"] = original
        values.setdefault("factor", max_positions / original)
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    is_read = not inner.missing and not inner.problems
    # With these, the rotation would divide by zero.
    if kind == "yarn" and theta <= 1:
        inner.problems.append(f"rope_theta must be above 1 for yarn, not {theta:g}")
    if kind == "llama3" and is_read and values["high_freq_factor"] <= values["low_freq_factor"]:
        inner.problems.append("high_freq_factor must be above low_freq_factor")
    fields.problems += [f"{name}.{p}" for p in inner.problems]
    fields.missing += [f"{name}.{m}" for m in inner.missing]
    return RopeConfig(theta=theta, kind=kind, partial=partial, **values)


def shape_problems(config: ModelConfig) -> list[str]:
    """What cannot be about a shape whose every number is right by itself."""
    problems = []
    if config.num_heads % config.num_kv_heads:
        problems.append(
            f"{config.num_heads} attention heads cannot be shared among {config.num_kv_heads} "
            "key/value heads"
        )
    rotated = int(config.head_dim * config.rope.partial)
    if rotated % 2 or not 0 < rotated <= config.head_dim:
        problems.append(
            f"a head of {config.head_dim} with partial_rotary_factor {config.rope.partial:g} has "
            f"{rotated} elements to rotate; an even number within the head is needed"
        )
    if config.rope.kind == "dynamic" and rotated == 2:
        problems.append("dynamic scaling needs more than two elements of a head to rotate")
    return problems
