"""Weights as they are stored: plain, 4-bit integers in groups, or 8-bit floats in squares.

A `StoredWeight` is one matrix or a stack of them, filled as the checkpoint holds it and expanded
when it is used; nothing is held twice. This is the reference path, on any device.

Shape suffixes: E stacked matrices, O out features, I in features, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.models.config import QuantConfig
from eyas.models.linear import Linear
from eyas.models.sharding import Shard, Size, Sizes, WeightShards, local_sizes

_PER_INT32 = 8  # 4-bit numbers in an int32, the first in the lowest bits


def unpack_int4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int32 [..., O, I / 8] and scales [..., O, I / group] -> [..., O, I].

    compressed-tensors' "pack-quantized" format: a number is stored as itself + 8.
    """
    shift = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    numbers = (((packed[..., None] >> shift) & 0xF) - 8).flatten(-2).to(dtype)
    groups = numbers.view(*scale.shape, -1)
    return (groups * scale[..., None].to(dtype)).flatten(-2)


def expand_fp8(weight: Tensor, scale: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """float8 [..., O, I] and one fp32 scale a square of `block` -> [..., O, I]; DeepSeek-V3
    (2024), section 3.3. Squares at the edges may be cut."""
    num_out, num_in = weight.shape[-2:]
    scale = scale.repeat_interleave(block, -2)[..., :num_out, :]
    scale = scale.repeat_interleave(block, -1)[..., :num_in]
    return (weight.float() * scale).to(dtype)


class StoredWeight(nn.Module):
    """A matrix [O, I], or [E, O, I] where `num_stacked` says so, in a storage of its own.

    parts, num_stacked: see `weight_slots`; sizes may be this rank's shards. Raises ValueError when
    in_features cannot be grouped.
    """

    def __init__(
        self,
        in_features: Size,
        out_features: Sizes,
        *,
        bias: bool = False,
        num_stacked: Size | None = None,
        quant: QuantConfig | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.shards = WeightShards.of(in_features, out_features)
        in_features, out_features, parts = local_sizes(in_features, out_features)
        if parts is not None:
            self.parts = parts
        if isinstance(num_stacked, Shard):
            self.stack_shard, num_stacked = num_stacked, num_stacked.size
        if num_stacked is not None:
            self.num_stacked = num_stacked
        self.quant, self.dtype = quant, dtype
        self.shape = (out_features, in_features)
        self._device, self._lead = device, () if num_stacked is None else (num_stacked,)
        self.bias = self._empty(out_features, dtype=dtype) if bias else None
        if quant is None:
            self.weight = self._empty(*self.shape, dtype=dtype)
        elif quant.scheme == "int4":
            if in_features % quant.group_size or in_features % _PER_INT32:
                raise ValueError(
                    f"{in_features} inputs are no multiple of a group of {quant.group_size}"
                )
            columns = in_features // quant.group_size
            self.weight_packed = self._empty(
                out_features, in_features // _PER_INT32, dtype=torch.int32
            )
            self.weight_scale = self._empty(out_features, columns, dtype=dtype)
        else:
            rows = sum(-(-size // quant.group_size) for size in self._part_sizes())
            self.weight = self._empty(*self.shape, dtype=torch.float8_e4m3fn)
            self.weight_scale_inv = self._empty(
                rows, -(-in_features // quant.group_size), dtype=torch.float32
            )

    def _empty(self, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        tensor = torch.empty(*self._lead, *shape, dtype=dtype, device=self._device)
        return nn.Parameter(tensor, requires_grad=False)

    def _part_sizes(self) -> list[int]:
        parts: dict[str, int] | None = getattr(self, "parts", None)
        return [self.shape[0]] if parts is None else list(parts.values())

    def part_rows(self, tensor: str) -> dict[str, int]:
        """Rows of each part in one of the tensors; squares of two parts are never shared."""
        if tensor != "weight_scale_inv" or self.quant is None:
            return self.parts
        return {name: -(-rows // self.quant.group_size) for name, rows in self.parts.items()}

    def dense(self, index_N: Tensor | None = None) -> Tensor:
        """The matrix [O, I], or those that index_N (int64) names in a stack, [N, O, I]."""

        def pick(tensor: Tensor) -> Tensor:
            return tensor if index_N is None else tensor.index_select(0, index_N)

        if self.quant is None:
            return pick(self.weight)
        if self.quant.scheme == "int4":
            return unpack_int4(pick(self.weight_packed), pick(self.weight_scale), self.dtype)
        block, sizes = self.quant.group_size, self._part_sizes()
        weights = torch.split(pick(self.weight), sizes, -2)
        scales = torch.split(pick(self.weight_scale_inv), [-(-n // block) for n in sizes], -2)
        pairs = zip(weights, scales, strict=True)
        return torch.cat([expand_fp8(w, s, block, self.dtype) for w, s in pairs], dim=-2)

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, I] -> [T, O] with a single matrix."""
        return F.linear(x_TI, self.dense(), self.bias)


def make_linear(
    in_features: Size,
    out_features: Sizes,
    *,
    bias: bool = False,
    quant: QuantConfig | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Linear | StoredWeight:
    """A linear layer in the storage that the checkpoint has for it."""
    if quant is None:
        return Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
    return StoredWeight(
        in_features, out_features, bias=bias, quant=quant, dtype=dtype, device=device
    )
