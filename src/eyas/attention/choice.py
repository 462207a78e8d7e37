"""Which attention backend serves a pool: by where it lies and what is installed."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from eyas.attention.torch_backend import TorchBackend
from eyas.cache.pool import KVPool

if TYPE_CHECKING:
    from eyas.attention.triton_backend import TritonBackend


def make_backend(pool: KVPool) -> TorchBackend | TritonBackend:
    """Triton's kernels on a GPU where Triton is installed; torch's operations anywhere else."""
    if not pool.k_LRKD.is_cuda or importlib.util.find_spec("triton") is None:
        return TorchBackend(pool)
    from eyas.attention.triton_backend import TritonBackend

    return TritonBackend(pool)
