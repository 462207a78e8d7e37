"""The noise behind every sampled token: its law, its independence and its exact values."""

import itertools
import math

import pytest
import torch
from fixtures.chi_square import p_value
from fixtures.slow_draft import slow_gumbel, slow_mix
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.kernels import choose_tokens, gumbel_noise

INT64 = st.integers(-(2**63), 2**63 - 1)
EXTREMES = (-(2**63), -(2**32), -(2**31) - 1, -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1)


def noise(seeds: list[int], positions: list[int], tokens: list[int]) -> torch.Tensor:
    return gumbel_noise(torch.tensor(seeds), torch.tensor(positions), torch.tensor(tokens))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    seeds=st.lists(INT64, min_size=1, max_size=3),
    positions=st.lists(st.integers(0, 2**24), min_size=3, max_size=3),
    tokens=st.lists(st.integers(0, 2**18), min_size=1, max_size=4),
)
def test_equals_integer_arithmetic_without_tensors(
    seeds: list[int], positions: list[int], tokens: list[int]
) -> None:
    values = noise(seeds, positions[: len(seeds)], tokens)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=False)):
        for column, token in enumerate(tokens):
            expected = slow_gumbel(seed, position, token)
            assert float(values[row, column]) == pytest.approx(expected, rel=2e-6, abs=2e-6)


def test_values_stay_what_they_are() -> None:
    """A seed must mean the same in the next release: these are frozen, not derived."""
    values = noise([0, 0, -1, 2**63 - 1], [0, 1, 5, 131_071], [0, 128_255])
    expected = [
        [2.29386, 0.73035],
        [1.52645, 2.00294],
        [0.40123, 3.51132],
        [-0.29514, 1.06390],
    ]
    torch.testing.assert_close(values, torch.tensor(expected), atol=1e-4, rtol=0)


def test_moments_and_range_over_a_million_values() -> None:
    values = gumbel_noise(torch.arange(100) - 50, torch.arange(100) * 7, torch.arange(20_000))
    assert values.dtype == torch.float32 and values.shape == (100, 20_000)
    assert torch.isfinite(values).all()
    wide = values.double()
    assert wide.mean().item() == pytest.approx(0.5772157, abs=0.004)
    assert wide.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)
    skew = ((wide - wide.mean()) ** 3).mean() / wide.var() ** 1.5
    assert skew.item() == pytest.approx(1.139547, abs=0.03)
    # The uniform under it fills a thousand equal cells alike.
    uniform = torch.exp(-torch.exp(-wide)).view(-1)
    count = torch.histc(uniform, bins=1000, min=0, max=1)
    assert p_value(count, torch.full((1000,), 1e-3)) > 1e-3


def test_the_tails_are_those_of_a_gumbel() -> None:
    """Rare large values matter: they choose the token. P(G > t) = 1 - exp(-exp(-t))."""
    values = gumbel_noise(torch.arange(300), torch.arange(300), torch.arange(20_000))
    for threshold in (5.0, 8.0, 10.0):
        share = -math.expm1(-math.exp(-threshold)) * values.numel()
        assert abs((values > threshold).sum().item() - share) < 4 * math.sqrt(share)
    share = math.exp(-math.exp(2.0)) * values.numel()
    assert abs((values < -2.0).sum().item() - share) < 4 * math.sqrt(share)


@pytest.mark.parametrize("seed", EXTREMES)
def test_extreme_seeds_are_seeds_like_others(seed: int) -> None:
    values = noise([seed] * 50, list(range(50)), list(range(2000)))
    assert torch.isfinite(values).all()
    assert values.mean().item() == pytest.approx(0.577, abs=0.02)
    others = [s for s in EXTREMES if s != seed]
    other = noise(others, [0] * len(others), list(range(2000)))
    assert ((other == values[0]).float().mean(dim=1) < 0.01).all()


def test_extreme_positions_do_not_overflow() -> None:
    values = noise([7] * 3, [2**20, 2**31, 2**33], list(range(1000)))
    assert torch.isfinite(values).all()
    assert (values.mean(dim=1) - 0.577).abs().max() < 0.15


def unmix(x: int) -> int:
    """The inverse of the hash."""
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x735A2D97, -1, 2**32) % 2**32
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x21F0AAAD, -1, 2**32) % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("bits", [0, 1, 2**24, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 1])
def test_the_extremes_of_the_uniform_are_finite(bits: int) -> None:
    """32 random bits round to 2^32 in fp32 about once in 2^25 values: found here by inverting the
    hash, as a random test would need a day."""
    assert all(slow_mix(unmix(x)) == x for x in (0, 1, 2**31, 0xDEADBEEF, bits))
    key = slow_mix(slow_mix(slow_mix(0x5851F42D)) + 9 * 0x1E3779B1 & 0xFFFFFFFF)
    token = unmix(unmix(bits) ^ slow_mix(key ^ 0x2545F491)) ^ key
    value = float(noise([0], [9], [token]))
    assert value == pytest.approx(slow_gumbel(0, 9, token), rel=1e-6)
    uniform = min((bits + 0.5) / 2**32, 1 - 2**-24)
    assert value == pytest.approx(-math.log(-math.log1p(-uniform)), abs=1e-2)
    assert -2.9 < value < 23


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


# What is added to seed, position and token.
AXES = {
    "next seed": (1, 0, 0),
    "seed, high half": (2**32, 0, 0),
    "negative seed": (-(2**63), 0, 0),
    "next position": (0, 1, 0),
    "a page on": (0, 16, 0),
    "next token": (0, 0, 1),
    "seed and position together": (1, -1, 0),
    "position and token together": (0, 1, -1),
}


@pytest.mark.parametrize("axis", list(AXES))
def test_neighbours_are_independent(axis: str) -> None:
    """No correlation of values or of large values between neighbouring rows and columns."""
    seed, position, token = AXES[axis]
    seeds, positions = torch.arange(200) * 13, torch.arange(200) % 50 + 100
    tokens = torch.arange(1, 1001)
    one = gumbel_noise(seeds, positions, tokens)
    two = gumbel_noise(seeds + seed, positions + position, tokens + token)
    limit = 4 / math.sqrt(one.numel())
    assert abs(correlation(one, two)) < limit
    assert abs(correlation((one > 3).double(), (two > 3).double())) < limit
    assert abs(correlation(one.square(), two.square())) < limit


def test_low_bits_of_the_winner_are_even() -> None:
    """The token with the most noise is uniform over the vocabulary, and so are pairs of rows."""
    winners = gumbel_noise(torch.arange(40_000), torch.full((40_000,), 9), torch.arange(32))
    winner_R = winners.argmax(1)
    assert p_value(winner_R.bincount(minlength=32), torch.full((32,), 1 / 32)) > 1e-3
    pairs_R = winner_R[:-1] * 32 + winner_R[1:]
    assert p_value(pairs_R.bincount(minlength=1024), torch.full((1024,), 1 / 1024)) > 1e-3


def test_each_row_is_a_function_of_its_own_arguments() -> None:
    """The same in any batch, and for a draft's part of the vocabulary (D9)."""
    seeds, positions = torch.tensor([5, -9, 5]), torch.tensor([3, 4, 5])
    tokens = torch.arange(500)
    whole = gumbel_noise(seeds, positions, tokens)
    for row in range(3):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], tokens)
        assert torch.equal(alone[0], whole[row])
    kept = torch.tensor([3, 17, 499])
    assert torch.equal(gumbel_noise(seeds, positions, kept), whole[:, kept])
    for one, other in itertools.combinations(range(3), 2):
        assert not torch.equal(whole[one], whole[other])


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.7, -3.0, 0.9])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_choices_follow_the_softmax(temperature: float) -> None:
    num = 50_000
    values = gumbel_noise(torch.arange(num), torch.full((num,), 11), torch.arange(8))
    chosen = choose_tokens(LOGITS.expand(num, -1), torch.full((num,), temperature), values)
    expected = (LOGITS / temperature).softmax(0)
    assert p_value(chosen.bincount(minlength=8), expected) > 1e-3
    # The test can fail: the law of another temperature is told apart.
    assert p_value(chosen.bincount(minlength=8), (LOGITS / temperature * 1.1).softmax(0)) < 1e-6


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_two_positions_are_chosen_independently(temperature: float) -> None:
    num = 50_000
    seeds, tokens = torch.arange(num) - num // 2, torch.arange(8)
    temperatures = torch.full((num,), temperature)
    first, second = (
        choose_tokens(
            LOGITS.roll(shift).expand(num, -1),
            temperatures,
            gumbel_noise(seeds, torch.full((num,), 20 + shift), tokens),
        )
        for shift in (0, 1)
    )
    one, two = ((LOGITS.roll(shift) / temperature).softmax(0) for shift in (0, 1))
    joint = (one[:, None] * two[None, :]).flatten()
    count = (first * 8 + second).bincount(minlength=64)
    assert p_value(count, joint) > 1e-3


def test_greedy_rows_ignore_the_noise() -> None:
    values = gumbel_noise(torch.arange(4), torch.arange(4), torch.arange(8))
    temperatures = torch.tensor([0.0, 1.0, 0.0, 1.0])
    logits = LOGITS.expand(4, -1)
    chosen = choose_tokens(logits, temperatures, values)
    assert chosen[[0, 2]].tolist() == [0, 0]
    assert chosen[[1, 3]].tolist() == (logits + values).argmax(1)[[1, 3]].tolist()
    assert choose_tokens(logits, temperatures, None).tolist() == [0] * 4
