"""Norms and gating in Triton: rounded where the reference rounds.

float16 shows that: the interpreter cuts bfloat16 off where a device rounds to the nearest, one
unit off at each of three steps, and in fp32 the order of a sum shows.
"""

from typing import Any

import pytest
import torch

from eyas.kernels import dispatch, reference

pytestmark = pytest.mark.interpreter

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def kernels() -> Any:
    """The module under test, imported where the interpreter is."""
    from eyas.kernels import triton_norm

    return triton_norm


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one rounding of float16, four of others."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    limit = torch.finfo(expected.dtype).eps * (1.1 if expected.dtype == torch.float16 else 4)
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 96), (3, 2304), (2, 3, 16)])
def test_rms_norm(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight_H = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    assert_close(kernels.rms_norm(x, weight_H, 1e-5), reference.rms_norm(x, weight_H, 1e-5))


def test_rms_norm_of_heads_within_a_projection(kernels: Any) -> None:
    heads = randn(3, 10, 32, dtype=torch.bfloat16)
    weight_D = randn(32, dtype=torch.bfloat16, seed=1)
    for part in (heads[:, :6], heads[:, 6:8]):
        assert not part.is_contiguous()
        assert_close(
            kernels.rms_norm(part, weight_D, 1e-6), reference.rms_norm(part, weight_D, 1e-6)
        )


def test_rms_norm_of_columns(kernels: Any) -> None:
    whole = randn(4, 80, dtype=torch.bfloat16)
    weight_H = randn(32, dtype=torch.bfloat16, seed=1)
    part = whole[:, 16:48]
    assert_close(kernels.rms_norm(part, weight_H, 1e-6), reference.rms_norm(part, weight_H, 1e-6))
    assert kernels.rms_norm(whole.T, randn(4, dtype=torch.bfloat16), 1e-6) is None


def test_eps_counts(kernels: Any) -> None:
    x, weight_H = torch.full((1, 32), 1e-3), torch.ones(32)
    assert_close(kernels.rms_norm(x, weight_H, 1e-2), reference.rms_norm(x, weight_H, 1e-2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_add_rms_norm(kernels: Any, num_rows: int, dtype: torch.dtype) -> None:
    x, delta = (randn(num_rows, 192, dtype=dtype, seed=s) for s in range(2))
    weight_H = randn(192, dtype=dtype, seed=2)
    total, out = kernels.add_rms_norm(x, delta, weight_H, 1e-5)
    expected_total, expected = reference.add_rms_norm(x, delta, weight_H, 1e-5)
    assert_close(total, expected_total)
    if dtype == torch.float16:
        assert torch.equal(total, expected_total)  # rounded before the norm
    assert_close(out, expected)


def test_other_dtypes_are_left_to_the_reference(kernels: Any) -> None:
    x = randn(2, 32, dtype=torch.bfloat16)
    assert kernels.rms_norm(x, torch.ones(32), 1e-5) is None
    assert kernels.add_rms_norm(x, x.float(), torch.ones(32, dtype=x.dtype), 1e-5) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_pair_norm(kernels: Any, dtype: torch.dtype) -> None:
    tokens_T = torch.tensor([4, 0, 10])
    embed_VH, hidden_TH = randn(11, 48, dtype=dtype), randn(3, 48, dtype=dtype, seed=1)
    norms = ((randn(48, dtype=dtype, seed=2), 1e-5), (randn(48, dtype=dtype, seed=3), 1e-2))
    out = kernels.pair_norm(tokens_T, embed_VH, hidden_TH, norms=norms)
    inputs = (embed_VH[tokens_T], hidden_TH)
    halves = [reference.rms_norm(x, *norm) for x, norm in zip(inputs, norms, strict=True)]
    expected = torch.cat(halves, dim=-1)
    assert_close(out, expected)
    assert torch.equal(dispatch.pair_norm(tokens_T, embed_VH, hidden_TH, norms=norms), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 4200), (2, 2, 36)])
def test_silu_mul(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype) * 4
    assert_close(kernels.silu_mul(x), reference.silu_mul(x))
    assert kernels.silu_mul(x[..., 1:]) is None
