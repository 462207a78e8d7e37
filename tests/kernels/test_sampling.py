"""Truncation without sorting, against a sort; log-probabilities against Python numbers."""

import itertools
import math

import pytest
import torch
from fixtures.slow_sampling import truncated
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas import kernels
from eyas.kernels import SamplingMode
from eyas.kernels.sampling import largest_threshold
from eyas.types import SamplingParams

# A machine that pauses is no reason to fail.
QUICK = settings(
    derandomize=True,
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow],
)
INF = math.inf
FLT_MAX = torch.finfo(torch.float32).max
TINY = 2.0**-149  # the smallest subnormal
# Bit patterns at every corner of fp32's order.
CORNERS = [-INF, -FLT_MAX, -1.0, -TINY, -0.0, 0.0, TINY, 2.0**-126, 1.0, 1.0 + 2.0**-23, FLT_MAX]
VALUES = st.one_of(
    st.sampled_from([*CORNERS, 3.5, 3.5]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def truncate(rows: list[list[float]], params: list[SamplingParams]) -> Tensor:
    return kernels.truncate(
        torch.tensor(rows, dtype=torch.float32),
        top_k_R=torch.tensor([p.top_k for p in params]),
        top_p_R=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p_R=torch.tensor([p.min_p for p in params], dtype=torch.float32),
    )


@QUICK
@given(
    values=st.lists(VALUES, min_size=1, max_size=9),
    weights=st.lists(st.integers(0, 5), min_size=9, max_size=9),
    want=st.integers(0, 50),
)
def test_largest_threshold_against_a_sort(
    values: list[float], weights: list[int], want: int
) -> None:
    """Any fp32 values; integer weights, so that sums are exact. A threshold is a value of the row,
    or as large as can be when no weight is wanted."""
    weights = weights[: len(values)]
    found = float(
        largest_threshold(
            torch.tensor([values], dtype=torch.float32),
            torch.tensor([weights], dtype=torch.float32),
            torch.tensor([want], dtype=torch.float32),
        )
    )
    pairs = list(zip(values, weights, strict=True))
    reached = [v for v in values if sum(w for other, w in pairs if other >= v) >= want]
    if want == 0:
        assert not any(v >= found for v in values) or found == -INF
    else:
        assert found == max(reached, default=-INF)


# Logarithms of these weights: many ties, tokens that are excluded, and exact probabilities.
WEIGHTS = st.sampled_from([0, 1, 1, 2, 2, 3, 8, 40])


@st.composite
def truncations(draw: st.DrawFn) -> SamplingParams:
    top_k = draw(st.sampled_from([0, 0, 1, 2, 3, 5, 9, 1000, 2**31]))
    top_p = draw(st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.35, 0.5, 0.83, 0.97, 0.999]))
    min_p = draw(st.sampled_from([0.0, 0.0, 1e-9, 0.03, 0.3, 0.45, 0.9, 1.0]))
    return SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)


def far_from_borders(weights: list[int], params: SamplingParams) -> bool:
    """No sum of top-p and no ratio of min-p within fp32 rounding of its limit."""
    ranked = sorted(weights, reverse=True)
    if params.top_k:
        border = ranked[min(params.top_k, len(ranked)) - 1]
        ranked = [w for w in ranked if w >= border]
    sums = itertools.accumulate(w / sum(ranked) for w in ranked)
    ratios = [w / ranked[0] for w in ranked]
    return all(abs(s - params.top_p) > 1e-5 for s in sums if params.top_p < 1) and all(
        abs(r - params.min_p) > 1e-5 for r in ratios if 0 < params.min_p < 1
    )


@QUICK
@given(
    rows=st.lists(
        st.tuples(st.lists(WEIGHTS, min_size=7, max_size=7), truncations()), min_size=1, max_size=4
    ),
    shift=st.sampled_from([0.0, -80.0, 60.0]),
)
def test_truncate_against_a_sort(
    rows: list[tuple[list[int], SamplingParams]], shift: float
) -> None:
    assume(all(any(weights) and far_from_borders(weights, p) for weights, p in rows))
    scores = [[math.log(w) + shift if w else -INF for w in weights] for weights, _ in rows]
    scores = torch.tensor(scores, dtype=torch.float32).tolist()
    params = [p for _, p in rows]
    got = truncate(scores, params)
    for row, (given_scores, one) in enumerate(zip(scores, params, strict=True)):
        want = truncated(given_scores, one)
        assert got[row].tolist() == want
        assert max(want) > -INF  # something is always left
    # A row does not depend on its neighbours.
    alone = torch.cat([truncate([s], [p]) for s, p in zip(scores, params, strict=True)])
    assert torch.equal(alone, got)


@pytest.mark.parametrize("vocab_size", [1000, 50_000, 128_256])
def test_truncate_of_a_large_vocabulary(vocab_size: int) -> None:
    """Against torch's sort; top-p may keep or drop a token whose border is within rounding."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits_RV = torch.randn(6, vocab_size, generator=generator) * 3
    top_k = [0, 50, 1, vocab_size, 0, 7]
    top_p = [0.9, 0.8, 1.0, 0.5, 1.0, 1.0]
    min_p = [0.0, 0.0, 0.0, 0.0, 0.02, 0.5]
    got_RV = kernels.truncate(
        logits_RV,
        top_k_R=torch.tensor(top_k),
        top_p_R=torch.tensor(top_p),
        min_p_R=torch.tensor(min_p),
    )
    for row in range(6):
        scores, order = logits_RV[row].double().sort(descending=True)
        keep = torch.ones(vocab_size, dtype=torch.bool)
        if top_k[row]:
            keep[top_k[row] :] = False
        mass = scores.masked_fill(~keep, -INF).softmax(0)
        before = mass.cumsum(0) - mass
        if top_p[row] < 1:
            keep &= before < top_p[row]
        keep &= scores >= scores[0] + math.log(min_p[row] or 1e-300)
        different = keep != (got_RV[row, order] > -INF)
        assert different.sum() <= 2 and ((before - top_p[row]).abs()[different] < 1e-5).all()
        kept = got_RV[row] > -INF
        assert torch.equal(got_RV[row, kept], logits_RV[row, kept])


def test_nothing_asked_for_changes_nothing() -> None:
    scores = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    got = truncate(scores.tolist(), [SamplingParams()] * 3)
    assert torch.equal(got, scores)


def test_ties_at_the_border_are_kept() -> None:
    """So that the result does not depend on the order of ids."""
    row = [0.0, 1.0, 1.0, 1.0, -5.0]
    kept = [-INF, 1.0, 1.0, 1.0, -INF]
    assert truncate([row], [SamplingParams(top_k=2)]).tolist() == [kept]
    assert truncate([row], [SamplingParams(top_p=0.4)]).tolist() == [kept]
    assert truncate([row], [SamplingParams(min_p=1.0)]).tolist() == [kept]


@pytest.mark.parametrize("top_p", [1e-46, 1e-38, 1e-9])
def test_the_smallest_top_p_keeps_the_best_token(top_p: float) -> None:
    """Even one which is zero in fp32: the smallest set is never empty, nor everything."""
    got = truncate([[0.0, 2.0, 1.0]], [SamplingParams(top_p=top_p)])
    assert got.tolist() == [[-INF, 2.0, -INF]]


def test_one_token_is_kept_whatever_is_asked() -> None:
    strict = SamplingParams(top_k=1, top_p=1e-6, min_p=1.0)
    assert truncate([[-3.0]], [strict]).tolist() == [[-3.0]]
    assert truncate([[-INF, -3.0, -INF]], [strict]).tolist() == [[-INF, -3.0, -INF]]


def test_top_p_counts_the_mass_within_top_k() -> None:
    """0.5, 0.3, 0.2: among the best two the first has 0.625, so top_p 0.6 keeps it alone."""
    row = [math.log(p) for p in (0.5, 0.3, 0.2)]
    got = truncate([row] * 2, [SamplingParams(top_k=2, top_p=0.6), SamplingParams(top_p=0.6)])
    assert (got > -INF).tolist() == [[True, False, False], [True, True, False]]


@QUICK
@given(
    row=st.lists(st.integers(-400, 400).map(lambda i: i / 8), min_size=3, max_size=8),
    num_top=st.integers(0, 3),
    data=st.data(),
)
def test_token_logprobs(row: list[float], num_top: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(row) - 1))
    ids, values = kernels.token_logprobs(torch.tensor([row]), torch.tensor([chosen]), num_top)
    assert ids.shape == values.shape == (1, 1 + num_top) and ids.dtype == torch.int64
    best = max(row)
    log_sum = best + math.log(math.fsum(math.exp(x - best) for x in row))
    expected = [row[token] - log_sum for token in ids[0].tolist()]
    assert values[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert ids[0, 0] == chosen
    top = sorted(row, reverse=True)[:num_top]
    assert [row[token] for token in ids[0, 1:].tolist()] == top
    assert len(set(ids[0, 1:].tolist())) == num_top


MODES = [
    SamplingMode(),
    SamplingMode(noise=True),
    SamplingMode(truncate=True),
    SamplingMode(penalize=True),
    SamplingMode(bias=True),
    SamplingMode(num_logprobs=0),
    SamplingMode(num_logprobs=5),
    SamplingMode(noise=True, bias=True, num_logprobs=2),
]


def test_a_batch_needs_what_any_request_needs() -> None:
    for one, other in itertools.product(MODES, MODES):
        joined = one | other
        assert joined == other | one
        for name in ("noise", "truncate", "penalize", "bias"):
            assert getattr(joined, name) is (getattr(one, name) or getattr(other, name))
        counts = [n for n in (one.num_logprobs, other.num_logprobs) if n is not None]
        assert joined.num_logprobs == (max(counts) if counts else None)  # 0 asks for more than None
