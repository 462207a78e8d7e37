"""What a benchmark found, and how it follows from the samples."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from eyas.bench.loops import distinct_bigrams, is_looping
from eyas.bench.timing import Rates

# Two right float32 implementations differ by rounding; logits nearer than this are a tie.
NEAR_TIE = 1e-3


@dataclasses.dataclass(frozen=True)
class Sample:
    """One run. rounds: (target forwards after the prompt, tokens that they emitted) by request,
    where the contender counts them."""

    token_ids: list[list[int]]
    rates: Rates
    rounds: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    @classmethod
    def joined(cls, batches: Sequence[Sample]) -> Sample:
        """Batches that ran one after the other as one run."""
        return cls(
            [output for batch in batches for output in batch.token_ids],
            Rates.joined([batch.rates for batch in batches]),
            [counts for batch in batches for counts in batch.rounds],
        )


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, least and most of the repeats."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], baseline: Sequence[float]) -> Spread:
        """Of the ratios within each repeat, which what else ran on the machine touches least."""
        return cls.of([value / base for value, base in zip(values, baseline, strict=True)])


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Tokens a target forward, the bonus token included, over the outputs that do not loop.

    length: None when all of them loop, as the figure would say nothing. A simulated acceptance
    does not depend on the text: loops do not matter.
    """

    length: float | None
    num_outputs: int
    num_looping: int
    is_simulated: bool = False

    @classmethod
    def of(cls, sample: Sample, *, is_simulated: bool = False) -> Acceptance:
        """Of a run that counted its rounds."""
        loops = [not is_simulated and is_looping(output) for output in sample.token_ids]
        kept = [c for c, looping in zip(sample.rounds, loops, strict=True) if not looping]
        num_rounds, num_tokens = sum(c[0] for c in kept), sum(c[1] for c in kept)
        length = num_tokens / num_rounds if num_rounds else None
        return cls(length, len(loops), sum(loops), is_simulated)


@dataclasses.dataclass(frozen=True)
class Result:
    """One contender at one batch size. Speeds are tokens a second of the whole batch; `decode`
    leaves the prefill out and `whole` does not. ratio: its decode speed to the baseline's, None
    for the baseline. ceiling_share: decode speed by what memory allows plain decoding."""

    contender: str
    batch_size: int
    decode: Spread
    whole: Spread
    first_token_seconds: Spread
    ratio: Spread | None
    ceiling_share: float
    acceptance: Acceptance | None


@dataclasses.dataclass(frozen=True)
class OutputCheck:
    """How the greedy tokens of one contender compare with another's.

    Where they differ: the first output that does, where in it, both tokens (the reference's
    first), and by how much logits prefer the reference's token (None without transformers).
    """

    contender: str
    reference: str
    batch_size: int
    num_outputs: int
    num_equal: int
    prompt: int | None = None
    position: int | None = None
    tokens: tuple[int, int] | None = None
    logit_gap: float | None = None

    @property
    def is_near_tie(self) -> bool:
        """Whether the two tokens are so near that rounding decides."""
        return self.logit_gap is not None and abs(self.logit_gap) < NEAR_TIE

    @property
    def equal(self) -> bool:
        """Whether all outputs are the same."""
        return self.num_equal == self.num_outputs


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """What memory allows plain decoding: bytes read a step, tokens a second at most."""

    batch_size: int
    step_bytes: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class BatchResult:
    """One batch size. distinct_bigrams: (distinct, all) of the baseline's outputs together."""

    batch_size: int
    results: tuple[Result, ...]
    checks: tuple[OutputCheck, ...]
    ceiling: Ceiling
    distinct_bigrams: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class OfflineResult:
    """All that was measured. bandwidth: bytes a second; prompt_tokens: (shortest, longest)."""

    baseline: str
    dtype: str
    device: str
    threads: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    repeats: int
    bandwidth: Spread
    batches: tuple[BatchResult, ...]

    @property
    def must_agree(self) -> bool:
        """Whether differing outputs are a failure: in narrower dtypes near ties are common."""
        return self.dtype == "float32"

    @property
    def ok(self) -> bool:
        """Whether the outputs are what they must be."""
        checks = [check for batch in self.batches for check in batch.checks]
        return not self.must_agree or all(c.equal or c.is_near_tie for c in checks)


def compare_outputs(
    contender: tuple[str, list[list[int]]],
    reference: tuple[str, list[list[int]]],
    *,
    batch_size: int,
    logit_gap: Callable[[int, list[int], int, int], float] | None = None,
) -> OutputCheck:
    """Compare two contenders' outputs, each given with its name.

    logit_gap: of (prompt number, tokens generated so far, reference's token, other token).
    """
    (name, outputs), (reference_name, expected) = contender, reference
    pairs = list(zip(outputs, expected, strict=True))
    num_equal = sum(ours == theirs for ours, theirs in pairs)
    check = OutputCheck(name, reference_name, batch_size, len(pairs), num_equal)
    for prompt, (ours, theirs) in enumerate(pairs):
        if ours == theirs:
            continue
        differing = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        position = next(differing)
        tokens = (theirs[position], ours[position])
        gap = logit_gap(prompt, theirs[:position], *tokens) if logit_gap else None
        return dataclasses.replace(
            check, prompt=prompt, position=position, tokens=tokens, logit_gap=gap
        )
    return check


def count_bigrams(outputs: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(distinct within each output, all), summed over the outputs."""
    return sum(map(distinct_bigrams, outputs)), sum(max(len(o) - 1, 0) for o in outputs)
