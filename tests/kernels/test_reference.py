"""The torch kernels against plain Python, one number at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas import kernels

QUICK = settings(derandomize=True, deadline=None, max_examples=150)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rms_norm() -> None:
    x_TH, weight_H = randn(5, 7), randn(7, seed=1)
    out_TH = kernels.rms_norm(x_TH, weight_H, 1e-5)
    for row, out in zip(x_TH.tolist(), out_TH.tolist(), strict=True):
        scale = 1 / math.sqrt(sum(v * v for v in row) / 7 + 1e-5)
        expected = [v * scale * w for v, w in zip(row, weight_H.tolist(), strict=True)]
        assert out == pytest.approx(expected, abs=1e-5)


def test_rms_norm_of_16_bit_rows_is_computed_in_fp32() -> None:
    """The squares of values around 300 overflow fp16; small ones vanish in it."""
    weight_H = torch.ones(64, dtype=torch.float16)
    for size in (300.0, 1e-4):
        out = kernels.rms_norm(torch.full((1, 64), size, dtype=torch.float16), weight_H, 1e-12)
        assert out.dtype == torch.float16
        torch.testing.assert_close(out, torch.ones_like(out), atol=2e-2, rtol=0)


def test_rms_norm_keeps_its_input_and_doubles_stay_doubles() -> None:
    x_TH = randn(3, 4, dtype=torch.float64)
    before = x_TH.clone()
    out = kernels.rms_norm(x_TH, torch.ones(4, dtype=torch.float64), 0.0)
    assert torch.equal(x_TH, before)
    assert out.square().mean(-1).tolist() == pytest.approx([1.0] * 3, abs=1e-14)


@pytest.mark.parametrize("rotary", [8, 4])
def test_apply_rope(rotary: int) -> None:
    """Element i of the first half turns with element i of the second; the rest stays (partial)."""
    x_THD, angle_TH = randn(3, 2, 8), randn(3, rotary // 2, seed=1)
    cos_T1D = torch.cat((angle_TH.cos(), angle_TH.cos()), dim=1)[:, None]
    sin_T1D = torch.cat((-angle_TH.sin(), angle_TH.sin()), dim=1)[:, None]
    before, half = x_THD.clone(), rotary // 2
    out_THD = kernels.apply_rope(x_THD, cos_T1D, sin_T1D)
    assert torch.equal(x_THD, before)
    for t in range(3):
        for head in range(2):
            given_, out = x_THD[t, head].tolist(), out_THD[t, head].tolist()
            assert out[rotary:] == given_[rotary:]
            for i, angle in enumerate(angle_TH[t].tolist()):
                turned = complex(given_[i], given_[i + half]) * complex(
                    math.cos(angle), math.sin(angle)
                )
                assert (out[i], out[i + half]) == pytest.approx(
                    (turned.real, turned.imag), abs=1e-6
                )


def test_silu_mul() -> None:
    x_TI = randn(4, 10)
    for row, out in zip(x_TI.tolist(), kernels.silu_mul(x_TI).tolist(), strict=True):
        expected = [g / (1 + math.exp(-g)) * u for g, u in zip(row[:5], row[5:], strict=True)]
        assert out == pytest.approx(expected, abs=1e-6)


def test_copy_kv_rows_in_all_layers() -> None:
    pool_LRKD = randn(2, 6, 1, 3)
    before = pool_LRKD.clone()
    kernels.copy_kv_rows(pool_LRKD, torch.tensor([4, 5, 0]), torch.tensor([1, 2, 4]))
    assert torch.equal(pool_LRKD[:, [1, 2, 4]], before[:, [4, 5, 0]])  # as they were before
    assert torch.equal(pool_LRKD[:, [0, 3, 5]], before[:, [0, 3, 5]])


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(tokens, parents, choices) of one tree whose siblings are distinct."""
    num_nodes = draw(st.integers(1, 10))
    tokens, parents = [draw(st.integers(0, 5))], [-1]
    for node in range(1, num_nodes):
        parent = draw(st.integers(0, node - 1))
        taken = {tokens[n] for n in range(1, node) if parents[n] == parent}
        free = sorted(set(range(6)) - taken)
        if not free:
            break
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
    choices = [draw(st.integers(0, 5)) for _ in tokens]
    return tokens, parents, choices


def slow_walk(tokens: list[int], parents: list[int], choices: list[int]) -> list[int]:
    """Nodes visited from the root on."""
    path = [0]
    while True:
        children = [n for n, parent in enumerate(parents) if parent == path[-1]]
        match = [n for n in children if tokens[n] == choices[path[-1]]]
        if not match:
            return path
        path.append(match[0])


def depth_of(parents: list[int]) -> int:
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return max(depths)


@QUICK
@given(st.lists(trees(), min_size=1, max_size=4))
def test_walk_tree(batch: list[tuple[list[int], list[int], list[int]]]) -> None:
    width = max(len(tokens) for tokens, _, _ in batch)
    depth = max(depth_of(parents) for _, parents, _ in batch)

    def stacked(index: int, padding: int) -> Tensor:
        return torch.tensor([t[index] + [padding] * (width - len(t[index])) for t in batch])

    # Unused nodes carry a token that is often chosen, and no parent.
    path_BE, emitted_BE, num_accepted_B = kernels.walk_tree(
        stacked(0, 0), stacked(1, -1), stacked(2, 0), depth=depth
    )
    assert path_BE.shape == emitted_BE.shape == (len(batch), depth + 1)
    for row, (tokens, parents, choices) in enumerate(batch):
        path = slow_walk(tokens, parents, choices)
        assert num_accepted_B[row] == len(path) - 1
        assert path_BE[row].tolist() == path + [path[-1]] * (depth + 1 - len(path))
        emitted = [tokens[node] for node in path[1:]] + [choices[path[-1]]]
        assert emitted_BE[row, : len(path)].tolist() == emitted


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[int], int, list[int], int, bool]:
    """(emitted, accepted, stop ids, remaining, active) of one request; blocks of six."""
    emitted = draw(st.lists(st.integers(0, 9), min_size=6, max_size=6))
    stops = draw(st.lists(st.integers(0, 9), max_size=3, unique=True))
    active = draw(st.booleans())
    remaining = draw(st.integers(1 if active else 0, 8))
    return emitted, draw(st.integers(0, 5)), stops, remaining, active


def slow_cut(
    emitted: list[int], accepted: int, stops: list[int], remaining: int, active: bool
) -> tuple[int, int]:
    """Token by token."""
    if not active:
        return 0, kernels.NO_FINISH
    for count, token in enumerate(emitted[: accepted + 1], start=1):
        if token in stops:
            return count, kernels.FINISH_STOP
        if count == remaining:
            return count, kernels.FINISH_LENGTH
    return accepted + 1, kernels.NO_FINISH


@QUICK
@given(st.lists(blocks(), min_size=1, max_size=5))
def test_cut_emitted(batch: list[tuple[list[int], int, list[int], int, bool]]) -> None:
    num_emitted_B, finish_B = kernels.cut_emitted(
        torch.tensor([b[0] for b in batch]),
        torch.tensor([b[1] for b in batch]),
        stop_ids_BS=torch.tensor([b[2] + [-1] * (3 - len(b[2])) for b in batch]),
        remaining_B=torch.tensor([b[3] for b in batch]),
        active_B=torch.tensor([b[4] for b in batch]),
    )
    got = list(zip(num_emitted_B.tolist(), finish_B.tolist(), strict=True))
    assert got == [slow_cut(*block) for block in batch]


@pytest.mark.parametrize(
    ("stop_index", "expected"),
    [(2, (3, kernels.FINISH_STOP)), (4, (5, kernels.FINISH_STOP)), (5, (5, kernels.FINISH_LENGTH))],
)
def test_a_block_of_six_with_a_cap_of_five(stop_index: int, expected: tuple[int, int]) -> None:
    """sgl-project/sglang#31599: a stop before the cap is a stop, and nothing after it leaks."""
    num_emitted_B, finish_B = kernels.cut_emitted(
        torch.arange(6)[None],
        torch.tensor([5]),
        stop_ids_BS=torch.tensor([[stop_index, -1]]),
        remaining_B=torch.tensor([5]),
        active_B=torch.tensor([True]),
    )
    assert (int(num_emitted_B), int(finish_B)) == expected
