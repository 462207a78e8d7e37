"""What a small-row linear layer may be run as: forms, configurations, and the search space.

Holds no kernel, so that plans can be made and read where Triton is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

# plain: y = x W^T (+ b); norm: RMSNorm of x first; add: plus a residual, rounded after the sum of
# products was; gated: norm, then silu(gate) * up of the two halves of W.
Form = Literal["plain", "norm", "add", "gated"]
FORMS: tuple[Form, ...] = ("plain", "norm", "add", "gated")

MAX_ROWS = 64
_VECTOR_ROWS = 4  # rows up to which products are made without matrix units
_LANE_ELEMENTS = 256  # elements of a row of weights that one warp loads at once


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """One way to run a layer for up to `rows` rows.

    kind: "vector" (products lane by lane) or "matrix" (tl.dot). block_out: rows of the weight a
    program; block_in: elements of them at a time. weights_first: the weight is the left operand.
    norm_apart: the norm is a kernel of its own.
    """

    kind: Literal["vector", "matrix"]
    rows: int
    block_out: int
    block_in: int
    num_warps: int
    num_stages: int = 1
    weights_first: bool = False
    norm_apart: bool = False

    def fits(self, form: Form, *, num_out: int, num_in: int) -> bool:
        """Whether a layer of this shape can be run so, without much waste."""
        if form == "gated" and num_out % 2:
            return False
        num_out = num_out // 2 if form == "gated" else num_out
        return self.block_out <= num_out and self.block_in <= max(num_in, 16)


ROW_BUCKETS = (1, 2, 4, 16, MAX_ROWS)


def row_bucket(num_rows: int) -> int | None:
    """Rows that num_rows rows are planned as; None where they are too many."""
    return next((rows for rows in ROW_BUCKETS if num_rows <= rows), None)


@dataclasses.dataclass(frozen=True)
class LinearPlan:
    """What was chosen for one layer: by form and bucket of rows, None for the plain product."""

    choices: Mapping[tuple[Form, int], LinearConfig | None]

    def config(self, form: Form, num_rows: int) -> LinearConfig | None:
        """The configuration for so many rows, None where there is none."""
        bucket = row_bucket(num_rows)
        return None if bucket is None else self.choices.get((form, bucket))


def search_space(form: Form, *, rows: int, wide: bool = False) -> Iterator[LinearConfig]:
    """Configurations worth timing for up to `rows` rows; wide: many more, for benchmarks."""
    if rows <= _VECTOR_ROWS:
        yield from _vector_space(form, rows, wide)
    if 1 < rows <= MAX_ROWS:
        yield from _matrix_space(form, max(rows, 16), wide)


def _vector_space(form: Form, rows: int, wide: bool) -> Iterator[LinearConfig]:
    sizes = (2, 4, 8) if form != "gated" else (1, 2, 4)  # of two products each
    pairs = [(sizes[1], 4), (sizes[0], 8), (sizes[2], 4)]
    if wide:
        pairs = [(size, warps) for size in (1, *sizes[-2:]) for warps in (2, 4, 8)]
    for block_out, num_warps in pairs:
        block_in = _LANE_ELEMENTS * num_warps
        config = LinearConfig("vector", rows, block_out, block_in, num_warps)
        yield config
        if wide and form in ("norm", "gated") and (block_out, num_warps) == (4, 4):
            yield dataclasses.replace(config, norm_apart=True)


def _matrix_space(form: Form, rows: int, wide: bool) -> Iterator[LinearConfig]:
    sizes = [(32, 256, 4, 4), (64, 128, 4, 5)] if rows <= 16 else [(64, 128, 4, 4)]
    if wide:
        sizes += [(16, 256, 2, 5), (16, 512, 4, 4), (32, 128, 4, 6), (64, 256, 4, 3)]
        sizes += [(128, 64, 4, 5), (128, 128, 8, 3)]
    for number, (block_out, block_in, num_warps, num_stages) in enumerate(sizes):
        if form == "gated":
            block_out = max(block_out // 2, 16)
        base = LinearConfig("matrix", rows, block_out, block_in, num_warps, num_stages)
        for weights_first in (True, False) if wide else (block_out >= 64,):
            config = dataclasses.replace(base, weights_first=weights_first)
            if form in ("norm", "gated"):
                yield dataclasses.replace(config, norm_apart=True)
                if rows > 16 or number > 1:  # each program would read too much of x
                    continue
            yield config
