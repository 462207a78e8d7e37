"""Which attention runs: Triton's kernels where a trial on this very device gives the reference's
result, else the reference. By probe, not by a table of cards (D8).

Shape suffixes as in attention.torch_backend.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch

from eyas.attention.torch_backend import TorchBackend
from eyas.cache.pool import NUM_RESERVED_PAGES, KVPool
from eyas.contract.attention import KVLayout
from eyas.types import EyasError

logger = logging.getLogger(__name__)

Choice = Literal["auto", "torch", "triton"]
_PAGES, _ROWS, _NODES, _GROUPS = 4, 3, 4, 2  # of the trial: two requests, a chain of three rows
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclasses.dataclass(frozen=True)
class ChosenBackend:
    """make: from a pool to its backend. any_length: plans do not depend on the bound of lengths.
    name: for the log."""

    make: Callable[[KVPool], Any]
    any_length: bool
    name: str


TORCH = ChosenBackend(TorchBackend, False, "torch")


def choose_backend(
    choice: Choice, layout: KVLayout, dtype: torch.dtype, device: torch.device
) -> ChosenBackend:
    """The backend for pools of this layout. Raises EyasError where "triton" cannot run."""
    if choice == "torch" or (choice == "auto" and device.type != "cuda"):
        return TORCH
    problem = _problem(dataclasses.replace(layout, num_layers=1), dtype, device)
    if problem is None:
        from eyas.attention.triton_backend import TritonBackend

        return ChosenBackend(TritonBackend, True, "triton")
    if choice == "triton":
        raise EyasError(f"--attention-backend triton cannot run here: {problem}")
    logger.warning("attention by torch operations, which is slower: %s", problem)
    return TORCH


@functools.cache
def _problem(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why Triton's kernels cannot be used for this layout; None where they can."""
    if device.type != "cuda":
        return f"Triton's kernels need a GPU, not {device.type}"
    if layout.value_in_key:
        return "latent attention has no kernel yet"
    if dtype not in _TOLERANCE:
        return f"they do not compute in {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    from eyas.kernels.triton_attention_rotate import supports

    if not supports(dtype, layout.head_dim, layout.v_head_dim):
        return f"no kernel takes heads of {max(layout.head_dim, layout.v_head_dim)}"
    try:
        difference = _trial(layout, dtype, device)
    except Exception as error:  # a compiler's or a driver's: whatever it is, the reference runs
        return f"a trial failed with {type(error).__name__}: {error}"
    if not difference < _TOLERANCE[dtype]:  # NaN is none
        return f"a trial differed from the reference by {difference:.2g}"
    return None


@torch.inference_mode()
def _trial(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> float:
    """The largest difference between both backends' results for a chain over a few pages."""
    from eyas.attention.triton_backend import TritonBackend

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    num_heads = layout.num_kv_heads * _GROUPS
    query_THD = random(2 * _ROWS, num_heads, layout.head_dim)
    key_TKD = random(2 * _ROWS, layout.num_kv_heads, layout.head_dim)
    value_TKD = random(2 * _ROWS, layout.num_kv_heads, layout.v_head_dim)
    pools = []
    for _ in range(2):
        pool = KVPool(
            layout,
            num_pages=NUM_RESERVED_PAGES + 2 * _PAGES,
            page_size=16,
            num_slots=2,
            num_scratch_rows=_NODES,
            dtype=dtype,
            device=device,
        )
        pools.append(pool)
    for name in ("k_LRKD", "v_LRKD"):
        cache = getattr(pools[0], name)
        cache.copy_(random(*cache.shape))
        getattr(pools[1], name).copy_(cache)
    page = torch.arange(2 * _PAGES, device=device).view(2, _PAGES) + NUM_RESERVED_PAGES
    causal = torch.ones(_NODES, _NODES, dtype=torch.bool, device=device).tril_()[:_ROWS]
    results = []
    for backend in (TorchBackend(pools[0]), TritonBackend(pools[1])):
        plan = backend.plan_tree(
            page_table_BP=page,
            slots_B=torch.arange(2, device=device),
            first_index=0,
            end_index_B=torch.tensor((5, 16 * _PAGES - 1), device=device),
            visible_BQN=causal.expand(2, -1, -1),
            first_node=0,
            max_kv_len=16 * _PAGES,
        )
        plan.write(0, key_TKD, value_TKD)
        results.append(plan.attend(0, query_THD).float())
    return float((results[0] - results[1]).abs().max())
