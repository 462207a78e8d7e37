"""Weight files of a folder: what they hold, read from headers alone, and tensors one at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.models.config_file import LFS_PREFIX, read_json
from eyas.models.safetensors_header import CheckpointError, TensorInfo, read_header
from eyas.types import EyasError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Checkpoint", "CheckpointError", "NoWeightsError", "TensorInfo"]

_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.(?:safetensors|bin)")
# Never weights of the model, and often pickles of arbitrary objects.
_NOT_WEIGHTS = re.compile(
    r"(consolidated|adapter_|training_|optimizer|scheduler|scaler|rng_state|random_states).*"
)


# Names beside quantized weights, and tensors that are integers or constants in any checkpoint.
_QUANTIZED = re.compile(r".*(scale|zero|absmax|quant|packed|qweight|g_idx|weight_shape).*", re.I)
_NO_WEIGHTS = re.compile(r"(.*\.)?(d2t|t2d|rotary_emb\.inv_freq|masked_bias)")
PLAIN_DTYPES = {"float64", "float32", "bfloat16", "float16"}


class NoWeightsError(CheckpointError):
    """The folder holds no weight file at all (configuration files may be there)."""


class Checkpoint:
    """The tensors of a folder by name; opening reads headers, `read` and `stream` read weights.

    safetensors files win over .bin files; both may be sharded. Files of optimizers and trainers
    are never opened.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]) -> None:
        self.folder = folder
        self.tensors = tensors
        self._handles: dict[Path, Any] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """List the tensors of `folder`.

        Raises NoWeightsError when there is no weight file, and CheckpointError, which names each
        file, when one is missing, truncated, a Git-LFS pointer or otherwise broken, or when the
        index disagrees with the files.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder")
        index, files = _find_files(folder)
        problems: list[str] = []
        twice: list[str] = []
        tensors: dict[str, TensorInfo] = {}
        bin_handles: dict[Path, Any] = {}
        for file in files:
            try:
                if file.suffix == ".bin":
                    bin_handles[file] = _open_bin(file)
                    found = _bin_infos(file, bin_handles[file])
                else:
                    found = read_header(file)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            twice += [name for name in found if name in tensors]
            tensors |= found
        if twice:
            problems.append(f"{folder}: {_some(twice)} stored in two files")
        if index is not None and not problems:
            problems += _index_problems(index, tensors)
        if problems:
            raise CheckpointError("\n".join(problems))
        checkpoint = cls(folder, tensors)
        checkpoint._handles |= bin_handles
        return checkpoint

    @property
    def files(self) -> list[Path]:
        """The files that hold tensors, each once."""
        return list(dict.fromkeys(info.file for info in self.tensors.values()))

    @property
    def is_plain(self) -> bool:
        """Whether all weights are floats as they are: no packed integers, no scales beside them.
        Vocabulary maps and constants do not count."""
        return all(
            info.dtype in PLAIN_DTYPES and not _QUANTIZED.fullmatch(name)
            for name, info in self.tensors.items()
            if not _NO_WEIGHTS.fullmatch(name)
        )

    @property
    def num_bytes(self) -> int:
        """Stored size of all tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU, mapped from the file (treat it as read-only).

        Raises KeyError for an unknown name.
        """
        file = self.tensors[name].file
        if file not in self._handles:
            from safetensors import safe_open

            self._handles[file] = safe_open(file, framework="pt")
        handle = self._handles[file]
        tensor: Tensor = handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        return tensor

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, file by file and in the order of their bytes; each file is closed before
        the next is opened, so that mapped memory does not add up."""
        for file in self.files:
            for name, info in self.tensors.items():
                if info.file == file:
                    yield name, self.read(name)
            if file.suffix != ".bin":  # a .bin was parsed on opening; once is enough
                self._handles.pop(file, None)


def _find_files(folder: Path) -> tuple[dict[str, str] | None, list[Path]]:
    """(the index's weight_map, if there is one; the weight files)."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        single = folder / f"{stem}.{suffix}"
        if single.exists():
            return None, [single]
        index_file = folder / f"{stem}.{suffix}.index.json"
        if index_file.exists():
            return _read_index(index_file)
        files = [f for f in folder.glob(f"*.{suffix}") if not _NOT_WEIGHTS.match(f.name)]
        if files:
            return None, _unindexed(folder, sorted(files))
    raise NoWeightsError(f"{folder} has no .safetensors or .bin weights")


def _read_index(index_file: Path) -> tuple[dict[str, str], list[Path]]:
    try:
        weight_map = read_json(index_file).get("weight_map")
    except EyasError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index_file} names files outside its folder: {_some(outside)}")
    missing = [name for name in names if not (index_file.parent / name).exists()]
    if len(missing) == len(names):
        raise NoWeightsError(f"{index_file} names {len(names)} files and none of them is there")
    if missing:
        raise CheckpointError(
            f"{index_file} names {len(names)} files; missing: {', '.join(missing)}; get them again"
        )
    return weight_map, [index_file.parent / name for name in names]


def _unindexed(folder: Path, files: list[Path]) -> list[Path]:
    """Files under other names: one file, or a complete set of numbered shards."""
    if len(files) == 1 and not _SHARD.fullmatch(files[0].name):
        return files
    matches = [_SHARD.fullmatch(file.name) for file in files]
    sets = {(m[1], int(m[3])) for m in matches if m}
    if None in matches or len(sets) != 1:
        raise CheckpointError(
            f"{folder} has several weight files and no index: {_some([f.name for f in files])}; "
            "keep those of one model"
        )
    stem, total = sets.pop()
    here = {int(m[2]) for m in matches if m}
    missing = sorted(set(range(1, total + 1)) - here)
    if missing:
        raise CheckpointError(
            f"{folder}: {stem} has {total} shards; missing: {_some([str(n) for n in missing])}"
        )
    return files


def _index_problems(weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> list[str]:
    problems = []
    absent = Counter(file for name, file in weight_map.items() if name not in tensors)
    for file, count in absent.items():
        names = [n for n, f in weight_map.items() if f == file and n not in tensors]
        problems.append(
            f"{file} lacks {count} tensor(s) that the index places there: {_some(names)}"
        )
    moved = [n for n, f in weight_map.items() if n in tensors and tensors[n].file.name != f]
    if moved:
        problems.append(
            f"the index places {_some(moved)} in {weight_map[moved[0]]}, but "
            f"{tensors[moved[0]].file.name} holds it"
        )
    extra = [name for name in tensors if name not in weight_map]
    if extra:
        files = ", ".join(sorted({tensors[name].file.name for name in extra}))
        problems.append(f"{files} holds tensors that the index does not list: {_some(extra)}")
    return problems


def _open_bin(file: Path) -> dict[str, Tensor]:
    """The tensors of a .bin file, mapped. Nothing but tensors is ever unpickled."""
    import torch

    with file.open("rb") as stream:
        start = stream.read(len(LFS_PREFIX))
    if start == LFS_PREFIX:
        raise CheckpointError(
            f"{file} is a Git-LFS pointer and not the weights: run `git lfs pull`"
        )
    # Files from before torch 1.6 are no zip archives and cannot be mapped.
    mmap = start.startswith(b"PK")
    try:
        data = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises many kinds here, none of them its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{file} cannot be read as weights: {reason[0]}") from None
    if not isinstance(data, dict) or not data:
        raise CheckpointError(f"{file} holds no dictionary of tensors")
    others = [str(name) for name, value in data.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(f"{file} holds entries that are not tensors: {_some(others)}")
    return {str(name): value for name, value in data.items()}


def _bin_infos(file: Path, tensors: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            file,
            None,
            tensor.numel() * tensor.element_size(),
        )
        for name, tensor in tensors.items()
    }


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
