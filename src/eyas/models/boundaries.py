"""Layer ids of drafts as boundaries of the target (D3).

Boundary i is the residual stream that enters layer i. Some training code writes the same tensor as
"output of layer i - 1", so ids need a rule before they mean anything; the rule is part of what
is reported, as a wrong one costs acceptance and nothing else shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eyas.models.config import DraftFormat
from eyas.models.findings import Findings


@dataclasses.dataclass(frozen=True)
class BoundaryChoice:
    """Boundaries and the rule that gave them. is_guess: neither default matched the ids."""

    boundaries: tuple[int, ...]
    rule: str
    is_guess: bool = False


def default_boundaries(num_layers: int) -> tuple[int, int, int]:
    """What every code base captures when nothing is said: low, middle and high."""
    return 2, num_layers // 2, num_layers - 3


def translate_layer_ids(
    ids: Sequence[int], *, num_layers: int, format: DraftFormat
) -> BoundaryChoice:
    """Turn a checkpoint's layer ids into boundaries of a target of `num_layers` layers."""
    ids, default = tuple(ids), default_boundaries(num_layers)
    shifted = tuple(i + 1 for i in ids)
    if ids == default:
        return BoundaryChoice(ids, f"ids {list(ids)} are the default boundaries")
    if shifted == default:
        return BoundaryChoice(
            shifted, f"ids {list(ids)} are the default boundaries as layer outputs (+1)"
        )
    if max(ids) == num_layers:
        return BoundaryChoice(
            ids, f"ids {list(ids)} reach {num_layers}, the last boundary: taken as they are"
        )
    if format == "speculators":
        rule = f"ids {list(ids)} in a speculators file are boundaries"
        return BoundaryChoice(ids, rule, is_guess=True)
    return BoundaryChoice(
        shifted, f"ids {list(ids)} in a {format} file are layer outputs (+1)", is_guess=True
    )


def report_boundaries(boundaries: Sequence[int], *, num_layers: int, findings: Findings) -> None:
    """Add what is wrong with boundaries: out of 0..n, repeated, or not ascending."""
    shown = list(boundaries)
    hint = "give the right ones with --draft-boundaries, ascending"
    outside = [b for b in boundaries if not 0 <= b <= num_layers]
    if outside:
        findings.error(
            "pair",
            "boundaries-out-of-range",
            f"the draft reads boundaries {shown}; {outside} lie outside 0..{num_layers} of this "
            f"target of {num_layers} layers",
            hint,
        )
    elif len(set(boundaries)) < len(boundaries):
        findings.error(
            "pair",
            "boundaries-repeated",
            f"the draft reads boundaries {shown}, one of them twice",
            hint,
        )
    elif shown != sorted(boundaries):
        findings.error(
            "pair",
            "boundaries-not-ascending",
            f"the draft reads boundaries {shown}, which do not ascend; the order decides which "
            "columns of fc read which state",
            hint,
        )
