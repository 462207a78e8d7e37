"""Linear layers: merged projections, and the weight layout that is fastest on this CPU.

Shape suffixes: T tokens, I in features, O out features.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PackedLinear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear(nn.Module):
    """y = x W^T + b. `parts` names the checkpoint modules stacked on dim 0 (None: itself)."""

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        if not isinstance(out_features, int):
            self.parts = dict(out_features)
            out_features = sum(out_features.values())
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, False)
        self.bias = nn.Parameter(weight.new_empty(out_features), False) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        if self.packed is not None:
            return run_packed(x_TI, self.packed, self.bias)
        return F.linear(x_TI, self.weight, self.bias)


def run_packed(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    """oneDNN product with a weight that `pack` reordered."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], "")
    return result


def pack(weight_OI: Tensor, num_rows: int) -> Tensor | None:
    """The weight in oneDNN's own layout for about `num_rows` rows, or None where that is not to
    be had: the calls are private to torch, and an instruction set may lack the dtype."""
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, num_rows)
        run_packed(weight_OI.new_zeros(1, weight_OI.shape[1]), packed, None)
    except (AttributeError, RuntimeError):
        return None
    return packed


def choose_cpu_layout(weights: Sequence[Tensor], num_rows: int, *, repeats: int = 5) -> bool:
    """Whether packing pays for these shapes at `num_rows` rows, by timing both, interleaved.

    weights: one [O, I] tensor of each distinct shape. Returns False where packing is not there.
    """
    pairs = []
    for weight in weights:
        packed = pack(weight, num_rows)
        if packed is None:
            return False
        pairs.append((weight, packed, weight.new_ones(num_rows, weight.shape[1])))
    plain_times, packed_times = [], []
    for _ in range(repeats + 1):  # the first warms up and is dropped
        start = time.perf_counter()
        for weight, _, x in pairs:
            F.linear(x, weight)
        middle = time.perf_counter()
        for _, packed, x in pairs:
            run_packed(x, packed, None)
        plain_times.append(middle - start)
        packed_times.append(time.perf_counter() - middle)
    return statistics.median(packed_times[1:]) < statistics.median(plain_times[1:])


def optimize_for_cpu(model: nn.Module, num_rows: int) -> bool:
    """Pack all CPU linears of a loaded model if that is faster at `num_rows` rows a forward.

    The packed weight replaces the plain one, so that none is held twice, except where an
    embedding is the same tensor (a tied head: both are needed). Call it when embeddings and heads
    have been shared out, as it empties `weight`. Returns whether it packed.
    """
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    embeddings = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = [m for m in linears if m.weight.device.type == "cpu"]
    by_shape = {m.weight.shape: m.weight.data for m in linears}
    if not linears or not choose_cpu_layout(list(by_shape.values()), num_rows):
        return False
    for linear in linears:
        linear.packed = pack(linear.weight.data, num_rows)
        if linear.weight.data_ptr() not in embeddings:
            linear.weight = nn.Parameter(linear.weight.data.to("meta"), False)
    return True
