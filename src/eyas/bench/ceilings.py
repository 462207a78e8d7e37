"""What the device can do at most, measured, and what a round must cost at these rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from eyas.bench.bandwidth import ReadBandwidth, best_seconds, read_cost
from eyas.config import TreeShape
from eyas.contract.attention import KVLayout
from eyas.models.config import DraftConfig, ModelConfig

_COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
_PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
_PASSES = 10


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """copy_rate: bytes read and written a second; read_rate: bytes read a second; product_rate:
    floating-point operations a second of a square product of `product_size` in `dtype`."""

    copy_rate: float
    read_rate: float
    product_rate: float
    product_size: int
    dtype: str


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Copy, read and multiply, each the best of several passes."""
    copy_rate = _copy_rate(device)
    read_rate = ReadBandwidth(device).measure(num_passes=_PASSES)
    size = _PRODUCT_SIZE[device.type]
    left = torch.randn(size, size, device=device).to(dtype)
    right, result = torch.randn(size, size, device=device).to(dtype), torch.empty_like(left)
    product_seconds = _best(lambda: torch.mm(left, right, out=result), device)
    return Ceilings(
        copy_rate=copy_rate,
        read_rate=read_rate,
        product_rate=2 * size**3 / product_seconds,
        product_size=size,
        dtype=str(dtype).removeprefix("torch."),
    )


def _copy_rate(device: torch.device) -> float:
    source = torch.ones(_COPY_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: copy.copy_(source), device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    best_seconds(work, device, num_passes=2)  # warms up
    return best_seconds(work, device, num_passes=_PASSES)


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least that a round can cost: bytes that it must read, operations that it must do, and
    the seconds of both at the measured rates."""

    num_bytes: float
    num_flops: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCost:
    """Bytes of a pair of models. target_bytes: linears and head; fc_bytes: the projection of the
    captured features; draft_bytes: the draft's layer and head, read once a draft step; the others
    are keys and values of one token, and bytes an element."""

    target_bytes: int
    target_kv_bytes: int
    fc_bytes: int
    draft_bytes: int
    draft_kv_bytes: int
    dtype_bytes: int
    draft_dtype_bytes: int

    def floor(
        self, tree: TreeShape, *, batch_size: int, context_tokens: float, ceilings: Ceilings
    ) -> Floor:
        """Of a round with this much context a request on average.

        Weights cost their bytes at the read rate, or their operations at the product rate where
        that is more; keys and values come on top.
        """
        size, draft_size = self.dtype_bytes, self.draft_dtype_bytes
        parts = [(self.target_bytes, size, batch_size * tree.num_nodes)]
        kv_bytes = self.target_kv_bytes
        if self.fc_bytes and tree.depth:
            parts.append((self.fc_bytes, draft_size, batch_size * (tree.depth + 1)))
            parts.append((self.draft_bytes, draft_size, batch_size))  # the first level
            parts += [(self.draft_bytes, draft_size, batch_size * tree.topk)] * (tree.depth - 1)
            kv_bytes += self.draft_kv_bytes * tree.depth
        read_bytes = kv_bytes * batch_size * context_tokens
        seconds = read_bytes / ceilings.read_rate
        num_flops = 0.0
        for weight_bytes, element_bytes, num_rows in parts:
            flops = 2 * num_rows * weight_bytes / element_bytes
            read_bytes, num_flops = read_bytes + weight_bytes, num_flops + flops
            seconds += max(weight_bytes / ceilings.read_rate, flops / ceilings.product_rate)
        return Floor(read_bytes, num_flops, seconds)


def round_cost(
    target: ModelConfig,
    draft: DraftConfig | None,
    *,
    weight_bytes: tuple[int, int],
    layouts: tuple[KVLayout, KVLayout | None],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> RoundCost:
    """Of target and draft, whose weights take `weight_bytes` (embeddings included)."""
    size, draft_size = (dtype.itemsize for dtype in dtypes)
    plain = read_cost(
        target, target_weight_bytes=weight_bytes[0], layout=layouts[0], dtype_bytes=size
    )
    fc_bytes = draft_bytes = draft_kv_bytes = 0
    if draft is not None and layouts[1] is not None:
        decoder = draft.decoder
        fc_bytes = draft.num_features * decoder.hidden_size * draft_size
        embedding = decoder.vocab_size * decoder.hidden_size if draft.has_embedding else 0
        draft_bytes = weight_bytes[1] - fc_bytes - embedding * draft_size
        draft_kv_bytes = layouts[1].elements_per_token * draft_size
    return RoundCost(
        target_bytes=plain.weight_bytes,
        target_kv_bytes=plain.kv_bytes_per_token,
        fc_bytes=fc_bytes,
        draft_bytes=draft_bytes,
        draft_kv_bytes=draft_kv_bytes,
        dtype_bytes=size,
        draft_dtype_bytes=draft_size,
    )
