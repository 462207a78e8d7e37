"""Linear layers: merged projections, their plan on a GPU, and the weight layout that is fastest on
this CPU.

Shape suffixes: T tokens, I in features, O out features.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas import kernels
from eyas.kernels.linear_config import Form, LinearPlan
from eyas.models.sharding import Size, Sizes, WeightShards, local_sizes

MIN_PLAIN_GAIN = 1.15  # packed time over plain time from which plain is taken
SAMPLE_BYTES, MAX_TIMED_BYTES = 128 << 20, 16 << 20


class Linear(nn.Module):
    """y = x W^T + b. `parts` names the checkpoint modules stacked on dim 0 (None: itself).
    Sizes may be this rank's shards. form: how it is run most; plan: what was chosen for few rows on
    a GPU (models.linear_plan)."""

    form: Form = "plain"
    plan: LinearPlan | None = None

    def __init__(
        self,
        in_features: Size,
        out_features: Sizes,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.shards = WeightShards.of(in_features, out_features)
        num_in, num_out, parts = local_sizes(in_features, out_features)
        if parts is not None:
            self.parts = parts
        weight = torch.empty(num_out, num_in, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, False)
        self.bias = nn.Parameter(weight.new_empty(num_out), False) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        if self.packed is not None:
            return run_packed(x_TI, self.packed, self.bias)
        if self.plan is not None:
            out_TO = self.fused("plain", x_TI)
            if out_TO is not None:
                return out_TO
        return F.linear(x_TI, self.weight, self.bias)

    def fused(
        self,
        form: Form,
        x_TI: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual_TO: Tensor | None = None,
        first_output: int = 0,
    ) -> Tensor | None:
        """This layer in a form, of outputs first_output and later: by the plan's kernel, or None
        where it has none for so many rows.

        norm: weight and eps of the norm before; residual_TO: what is added after.
        """
        if self.plan is None or torch.is_grad_enabled() or x_TI.dim() != 2:
            return None
        config = self.plan.config(form, len(x_TI))
        if config is None:
            return None
        weight_OI: Tensor = self.weight
        bias_O: Tensor | None = self.bias
        if first_output:
            weight_OI = weight_OI[first_output:]
            bias_O = None if bias_O is None else bias_O[first_output:]
        return kernels.few_row_linear(
            x_TI,
            weight_OI,
            bias_O,
            config=config,
            norm=norm,
            residual_TO=residual_TO,
            is_gated=form == "gated",
        )

    def outputs_from(self, x_TI: Tensor, first_output: int) -> Tensor:
        """[T, I] -> [T, O - first_output], without reading the other outputs' weights. Not for
        packed layers."""
        assert self.packed is None
        out_TO = self.fused("plain", x_TI, first_output=first_output)
        if out_TO is not None:
            return out_TO
        bias_O = None if self.bias is None else self.bias[first_output:]
        return F.linear(x_TI, self.weight[first_output:], bias_O)


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


def choose_cpu_layout(weights: Sequence[Tensor], num_rows: int, *, num_passes: int = 5) -> bool:
    """Whether to pack weights of these shapes for `num_rows` rows: timed, packed unless plain is
    clearly faster (MIN_PLAIN_GAIN). False where packing is not there.

    weights: [O, I] each; a pass reads every one once in both layouts, one right after the other.
    The median of the passes' ratios decides. The clock is the CPU time of one thread, which does
    not run while the machine is busy with something else.
    """
    ratios = []
    with _one_thread():
        layouts = []
        for weight in weights:
            packed = pack(weight, num_rows)
            if packed is None:
                return False
            layouts.append((weight, packed, weight.new_ones(num_rows, weight.shape[1])))
        for _ in range(num_passes + 1):
            plain_seconds = packed_seconds = 0.0
            for weight, packed, x in layouts:
                start = time.thread_time()
                F.linear(x, weight)
                middle = time.thread_time()
                run_packed(x, packed, None)
                packed_seconds += time.thread_time() - middle
                plain_seconds += middle - start
            ratios.append(packed_seconds / plain_seconds)
    return statistics.median(ratios[1:]) < MIN_PLAIN_GAIN  # the first pass warmed up


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Several threads wait for the slowest at each call's end: on a busy machine that is what
    would be timed, and only in the layout whose kernel uses threads at these rows."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def timing_sample(weights: Iterable[Tensor]) -> list[Tensor]:
    """One weight of each shape, and more in order until SAMPLE_BYTES, each cut to the output rows
    that MAX_TIMED_BYTES hold.

    In a model each weight comes from memory; a few small ones read again would come from a cache.
    """
    shapes, num_bytes, sample = set(), 0, []
    for weight in weights:
        if weight.shape in shapes and num_bytes > SAMPLE_BYTES:
            continue
        shapes.add(weight.shape)
        sample.append(weight[: max(MAX_TIMED_BYTES // weight[0].nbytes, 1)])
        num_bytes += sample[-1].nbytes
    return sample


def optimize_for_cpu(model: nn.Module, num_rows: int) -> bool:
    """Pack all CPU linears of a loaded model unless that is slower at `num_rows` rows a forward.

    The packed weight replaces the plain one, so that none is held twice, except where an
    embedding is the same tensor (a tied head: both are needed). A head that two models share is
    packed once for each. Call it when embeddings and heads have been shared out, as it empties
    `weight`. Returns whether it packed.
    """
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    embeddings = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = [m for m in linears if m.weight.device.type == "cpu"]
    sample = timing_sample(m.weight.data for m in linears)
    if not sample or not choose_cpu_layout(sample, num_rows):
        return False
    for linear in linears:
        linear.packed = pack(linear.weight.data, num_rows)
        if linear.weight.data_ptr() not in embeddings:
            linear.weight = nn.Parameter(linear.weight.data.to("meta"), False)
    return True
