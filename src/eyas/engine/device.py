"""What "auto" means here and now: the device, its memory, and the dtype of a checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from eyas.config import EngineConfig
from eyas.kernels import has_triton, native
from eyas.kernels.linear_config import MAX_ROWS
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import ModelConfig
from eyas.types import EyasError

# Kept free: a GPU needs room for graphs and workspaces, a host for everything else that runs.
_HEADROOM = {"cpu": 0.2, "cuda": 0.08}


def resolve_device(name: str) -> str:
    """ "cpu" or "cuda" for a setting. Raises EyasError when a CUDA device is asked for in vain."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise EyasError("no CUDA device was found: use --device cpu, or look at nvidia-smi")
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    return name


def resolve_dtype(
    config: EngineConfig, target: ModelConfig, checkpoint: Checkpoint | None = None
) -> torch.dtype:
    """The dtype to run in: the setting, else what config.json says, else what most stored weights
    have, else float32."""
    name = config.dtype if config.dtype != "auto" else target.dtype
    if name is None:
        floats = ("float32", "bfloat16", "float16")
        stored = Counter(info.dtype for info in (checkpoint.tensors if checkpoint else {}).values())
        name = max(floats, key=lambda dtype: stored[dtype])
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def resolve_draft_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the draft beside a target that runs in `dtype`."""
    if config.draft_dtype == "auto":
        return dtype
    chosen = getattr(torch, config.draft_dtype)
    assert isinstance(chosen, torch.dtype)
    return chosen


def backends(device: str) -> dict[str, str]:
    """What will compute, by part: the names of the log and of `--explain`."""
    if device == "cuda" and has_triton(torch.device(device)):
        return {
            # Tried when the pools are made, which a check does not do.
            "attention": "Triton, where a trial at load gives the torch reference's result; "
            "latent attention: torch reference",
            "kernels": "Triton; experts and quantized weights: torch reference",
            "linear layers": f"cuBLAS, or Triton for up to {MAX_ROWS} rows where that is faster "
            "when timed at load",
        }
    linear = "cuBLAS" if device == "cuda" else "torch"
    if device == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        linear = "oneDNN, weights packed if that is faster when timed at load"
    return {
        "attention": "torch reference: pages gathered, scaled_dot_product_attention",
        # On a CPU, for few rows (attention's too), C that is compiled at first use.
        "kernels": native.status() if device == "cpu" else "torch reference (no Triton here)",
        "linear layers": linear,
    }


def memory_budget(
    device: str, *, num_ranks: int = 1, device_bytes: int | None = None
) -> int | None:
    """Bytes that a rank may use on its device, some headroom left; None where it cannot be told.

    device_bytes: plan with that in place of what is free here. A host's memory is shared by all
    ranks on it.
    """
    available = device_bytes
    if available is None:
        available = _cuda_bytes() if device == "cuda" else _host_bytes()
    if available is None:
        return None
    sharing = num_ranks if device == "cpu" else 1
    return int(available * (1 - _HEADROOM[device])) // sharing


def device_count(device: str) -> int | None:
    """Devices of a kind that ranks can have for themselves; None: any number."""
    return torch.cuda.device_count() if device == "cuda" else None


def _cuda_bytes() -> int:
    free, _ = torch.cuda.mem_get_info()
    return free


def _host_bytes() -> int | None:
    """Available memory of the host, or what a container's limit leaves, if that is less."""
    found = [_meminfo_bytes(), _cgroup_bytes()]
    known = [number for number in found if number is not None]
    if not known and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        known = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return min(known, default=None)


def _meminfo_bytes() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Limit less use of this control group (version 2, then 1), page cache not counted as use."""
    for limit_file, use_file, stat_file, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_cache",
        ),
    ):
        limit, use = _number(root / limit_file), _number(root / use_file)
        if limit is None or use is None:
            continue
        cache = _stat(root / stat_file, cache_key)
        return max(limit - max(use - cache, 0), 0)
    return None


def _stat(path: Path, key: str) -> int:
    values = (line.split() for line in _lines(path))
    return next((int(value[1]) for value in values if value and value[0] == key), 0)


def _number(path: Path) -> int | None:
    first = next(iter(_lines(path)), "")
    return int(first) if first.isdigit() else None  # "max" is no limit


def _lines(path: Path) -> Iterable[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
