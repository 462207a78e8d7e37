"""What must hold of a draft's vocabulary maps.

d2t (integers, one a draft id) is an offset: target id = draft id + d2t[draft id]. t2d (flags, one
a target id) marks the ids that the draft can propose. As the kept ids are sorted, both say the
same: draft id i is the i-th marked one.

Shape suffixes: D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eyas.models.findings import Findings

if TYPE_CHECKING:
    from torch import Tensor


def map_findings(d2t_D: Tensor, t2d_V: Tensor | None, *, target_vocab_size: int) -> Findings:
    """Check a stored map by value; t2d_V may be absent. Returns findings, none when all is well."""
    import torch

    findings = Findings()
    if d2t_D.is_floating_point() or d2t_D.dtype == torch.bool:
        findings.error(
            "draft",
            "vocab-map-dtype",
            f"d2t is stored as {str(d2t_D.dtype).removeprefix('torch.')}; ids need integers",
            "export d2t again as int64",
        )
        return findings
    offsets_D = d2t_D.to(torch.int64)
    ids_D = torch.arange(len(offsets_D)) + offsets_D
    kept = None if t2d_V is None else t2d_V.to(torch.bool).nonzero().flatten()
    if _holds_absolute_ids(offsets_D, kept, target_vocab_size=target_vocab_size):
        findings.error(
            "draft",
            "vocab-map-absolute",
            "d2t holds target ids where offsets are expected (target id = draft id + d2t)",
            "subtract the index: d2t = kept_ids - arange(len(kept_ids))",
        )
        return findings
    _check_ids(ids_D, target_vocab_size, findings)
    if kept is not None and not findings:
        _compare(ids_D, kept, findings)
    if not findings and len(ids_D) < target_vocab_size and not offsets_D.any():
        findings.warn(
            "draft",
            "vocab-map-identity",
            f"d2t is all zero: the draft proposes only the ids 0 to {len(ids_D) - 1} of "
            f"{target_vocab_size}",
            "check that the map was saved with the draft",
        )
    return findings


def _holds_absolute_ids(offsets_D: Tensor, kept: Tensor | None, *, target_vocab_size: int) -> bool:
    import torch

    if not len(offsets_D) or not offsets_D.any():
        return False
    if kept is not None:
        return len(kept) > 1 and torch.equal(offsets_D, kept)
    # Without t2d: sorted ids that are all in range, and as offsets would run out of it.
    indices = torch.arange(len(offsets_D))
    in_range = bool((offsets_D >= indices).all()) and bool(offsets_D[-1] < target_vocab_size)
    ascending = bool((offsets_D.diff() > 0).all())
    return in_range and ascending and bool((offsets_D + indices).max() >= target_vocab_size)


def _check_ids(ids_D: Tensor, target_vocab_size: int, findings: Findings) -> None:
    outside = (ids_D < 0) | (ids_D >= target_vocab_size)
    if outside.any():
        first = int(outside.nonzero()[0])
        findings.error(
            "pair",
            "vocab-map-out-of-range",
            f"d2t maps {int(outside.sum())} draft ids outside the target's vocabulary of "
            f"{target_vocab_size}; the first is draft id {first} to {int(ids_D[first])}",
            "the draft was made for another target, or d2t is damaged",
        )
        return
    steps = ids_D.diff()
    if (steps <= 0).any():
        first = int((steps <= 0).nonzero()[0])
        findings.error(
            "draft",
            "vocab-map-not-ascending",
            f"d2t maps draft ids {first} and {first + 1} to {int(ids_D[first])} and "
            f"{int(ids_D[first + 1])}; target ids must ascend",
            "export d2t again from the sorted kept ids",
        )


def _compare(ids_D: Tensor, kept: Tensor, findings: Findings) -> None:
    if len(kept) != len(ids_D):
        findings.error(
            "draft",
            "vocab-maps-disagree",
            f"t2d marks {len(kept)} target ids, d2t has {len(ids_D)} entries",
            "export both maps from the same list of kept ids",
        )
    elif (ids_D != kept).any():
        first = int((ids_D != kept).nonzero()[0])
        findings.error(
            "draft",
            "vocab-maps-disagree",
            f"draft id {first} is target id {int(ids_D[first])} by d2t and {int(kept[first])} by "
            "t2d",
            "export both maps from the same list of kept ids",
        )
