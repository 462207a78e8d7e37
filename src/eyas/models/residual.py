"""The residual stream between linear layers: norms before them and sums after, fused where a plan
says that it pays, else kept for the next norm, which adds up anyway.

Shape suffixes: T tokens, H hidden, I intermediate, O out features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor, nn

from eyas import kernels
from eyas.comm.group import Group
from eyas.kernels.linear_config import Form
from eyas.models.linear import Linear

if TYPE_CHECKING:
    from eyas.models.layers import RMSNorm


class Stream(NamedTuple):
    """hidden + delta [T, H], a sum that is left to whoever reads it next; None: nothing to add."""

    hidden_TH: Tensor
    delta_TH: Tensor | None = None

    def total(self) -> Tensor:
        """The sum."""
        return self.hidden_TH if self.delta_TH is None else self.hidden_TH + self.delta_TH


def use_as(linear: nn.Module, form: Form) -> None:
    """Say in which form a layer will be run, for what chooses its plan; quantized layers have no
    forms."""
    if isinstance(linear, Linear):
        linear.form = form


def advance(part: nn.Module, norm: RMSNorm, stream: Stream, *args: Any) -> Stream:
    """One half of a block: stream + part(norm(stream), *args), by the part's own `advance` where
    it has one."""
    own = getattr(part, "advance", None)
    if own is not None:
        return cast(Stream, cast(Any, own)(norm, stream, *args))
    hidden_TH, normed_TH = norm.enter(stream)
    return Stream(hidden_TH, part(normed_TH, *args))


def norm_linear(norm: RMSNorm, linear: nn.Module, stream: Stream) -> tuple[Tensor, Tensor]:
    """(the stream's sum [T, H], linear(norm(sum)) [T, O])."""
    out_TO = None
    if stream.delta_TH is None and isinstance(linear, Linear):
        out_TO = linear.fused("norm", stream.hidden_TH, norm=(norm.weight, norm.eps))
    if out_TO is not None:
        return stream.hidden_TH, out_TO
    hidden_TH, normed_TH = norm.enter(stream)
    return hidden_TH, linear(normed_TH)


def norm_gated(norm: RMSNorm, linear: nn.Module, stream: Stream) -> tuple[Tensor, Tensor]:
    """(the stream's sum [T, H], silu(gate) * up [T, I] of gate and up = linear(norm(sum)))."""
    out_TI = None
    if stream.delta_TH is None and isinstance(linear, Linear):
        out_TI = linear.fused("gated", stream.hidden_TH, norm=(norm.weight, norm.eps))
    if out_TI is not None:
        return stream.hidden_TH, out_TI
    hidden_TH, normed_TH = norm.enter(stream)
    return hidden_TH, kernels.silu_mul(linear(normed_TH))


def linear_add(linear: nn.Module, x_TI: Tensor, hidden_TH: Tensor, *, group: Group) -> Stream:
    """hidden + linear(x), whose results are added up over the group."""
    if group.size == 1 and isinstance(linear, Linear):
        out_TH = linear.fused("add", x_TI, residual_TO=hidden_TH)
        if out_TH is not None:
            return Stream(out_TH)
    return Stream(hidden_TH, group.all_reduce(linear(x_TI)))
