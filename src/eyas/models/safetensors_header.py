"""The header of a safetensors file, read without its weights and checked against the file.

The format: 8 bytes little-endian length, a JSON object of that length, then the data; each tensor
has a dtype, a shape and a byte range, and the ranges cover the data without gap or overlap.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from eyas.models.config_file import LFS_PREFIX
from eyas.types import EyasError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

# The format's name: (torch's name, bits an element).
DTYPES = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "I64": ("int64", 64),
    "I32": ("int32", 32),
    "I16": ("int16", 16),
    "I8": ("int8", 8),
    "U64": ("uint64", 64),
    "U32": ("uint32", 32),
    "U16": ("uint16", 16),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "F4": ("float4_e2m1fn", 4),
}


class CheckpointError(EyasError):
    """Weight files that are broken or disagree with one another; names the file."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One stored tensor. dtype: torch's name. offset: first byte in `file`, None where the format
    hides it (.bin). num_bytes: stored size."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int | None
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of one file, in the order of their bytes.

    Raises CheckpointError when the file is truncated, is no safetensors file, or when its ranges
    overlap, leave gaps or do not fit its size, shapes and dtypes.
    """
    try:
        size = path.stat().st_size
        header, data_start = _read_json_header(path, size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(header.pop("__metadata__", {}), dict):
        raise CheckpointError(f"{path} has a broken header: its __metadata__ is not an object")
    infos = [_read_entry(path, name, entry, data_start) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.offset or 0, info.num_bytes))
    position = data_start
    for info in infos:
        assert info.offset is not None
        if info.offset < position:
            raise CheckpointError(
                f"{path}: the bytes of {info.name!r} overlap those of another tensor; the file is "
                "broken, get it again"
            )
        if info.offset > position:
            raise CheckpointError(
                f"{path}: {info.offset - position} bytes before {info.name!r} belong to no "
                "tensor; the file is broken, get it again"
            )
        position += info.num_bytes
    if position > size:
        raise CheckpointError(
            f"{path} is truncated: its header describes {position} bytes, the file has {size}; "
            "get it again"
        )
    if position < size:
        raise CheckpointError(
            f"{path} has {size - position} bytes after its last tensor; the file is broken, get "
            "it again"
        )
    return {info.name: info for info in infos}


def _read_json_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """(the JSON object, first byte of the data)."""
    with path.open("rb") as file:
        start = file.read(8)
        if (start + file.read(len(LFS_PREFIX) - 8)) == LFS_PREFIX:
            raise CheckpointError(
                f"{path} is a Git-LFS pointer and not the weights: run `git lfs pull`"
            )
        length = int.from_bytes(start, "little")
        if len(start) < 8:
            raise CheckpointError(f"{path} is truncated: it has {size} bytes; get it again")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is no safetensors file: its header cannot be read")
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is truncated within its header: {8 + length} bytes are described, the "
                f"file has {size}; get it again"
            )
        file.seek(8)
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a broken header: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a broken header: it is not an object")
    return header, 8 + length


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(twice)} appears twice")
    return found


def _read_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        code, shape = entry["dtype"], tuple(entry["shape"])
        start, end = entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} has a broken header: {name!r} is not described as a tensor")
    if code not in DTYPES:
        raise CheckpointError(f"{path}: {name!r} has the unknown dtype {code!r}")
    dtype, bits = DTYPES[code]
    num_bits = math.prod(shape) * bits
    if num_bits % 8 or num_bits // 8 != end - start:
        raise CheckpointError(
            f"{path}: {name!r} of shape {list(shape)} and dtype {dtype} needs {num_bits / 8:g} "
            f"bytes, its range has {end - start}"
        )
    return TensorInfo(name, shape, dtype, path, data_start + start, end - start)
