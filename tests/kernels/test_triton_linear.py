"""Few-row linears in Triton: every form and kind equals torch's operations one after another."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eyas.kernels import reference
from eyas.kernels.linear_config import (
    FORMS,
    Form,
    LinearConfig,
    LinearPlan,
    row_bucket,
    search_space,
)

NEEDS_TRITON = pytest.mark.interpreter
VECTOR = LinearConfig("vector", 2, block_out=2, block_in=256, num_warps=1)
MATRIX = LinearConfig("matrix", 16, block_out=16, block_in=64, num_warps=1, num_stages=2)
CONFIGS = {
    "vector": VECTOR,
    "vector of one row": dataclasses.replace(VECTOR, rows=1, block_out=4),
    "matrix": MATRIX,
    "matrix, weights first": dataclasses.replace(MATRIX, weights_first=True),
    "norm apart": dataclasses.replace(MATRIX, norm_apart=True),
}


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(
    form: Form, *, num_rows: int, num_in: int, num_out: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(x, weight, keywords of triton_linear.linear) of a layer."""
    x = randn(num_rows, num_in, dtype=dtype, seed=0)
    weight = randn(num_out, num_in, dtype=dtype, seed=1) / num_in**0.5
    keywords: dict[str, Any] = {"is_gated": form == "gated"}
    if form in ("norm", "gated"):
        keywords["norm"] = (randn(num_in, dtype=dtype, seed=2), 1e-5)
    if form == "add":
        keywords["residual_TO"] = randn(num_rows, num_out, dtype=dtype, seed=3)
    return x, weight, keywords


def expected(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, keywords: dict[str, Any]
) -> torch.Tensor:
    """One operation after another, each rounded."""
    if "norm" in keywords:
        x = reference.rms_norm(x, *keywords["norm"])
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if keywords["is_gated"]:
        return reference.silu_mul(y)
    return y + keywords["residual_TO"] if "residual_TO" in keywords else y


def check(
    form: Form,
    config: LinearConfig,
    *,
    num_rows: int,
    num_in: int = 320,
    num_out: int = 36,
    dtype: torch.dtype = torch.bfloat16,
    has_bias: bool = False,
) -> None:
    from eyas.kernels import triton_linear

    x, weight, keywords = arguments(
        form, num_rows=num_rows, num_in=num_in, num_out=num_out, dtype=dtype
    )
    bias = randn(num_out, dtype=dtype, seed=4) if has_bias else None
    y = triton_linear.linear(x, weight, bias, config=config, **keywords)
    # Sums in another order round to a neighbour here and there, and that once more at each further
    # step; the interpreter moreover cuts bfloat16 off where a device rounds.
    eps = torch.finfo(dtype).eps * (2 if dtype == torch.bfloat16 else 1)
    torch.testing.assert_close(y, expected(x, weight, bias, keywords), rtol=3 * eps, atol=3 * eps)


@NEEDS_TRITON
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_form(form: Form, name: str) -> None:
    config = CONFIGS[name]
    check(form, config, num_rows=min(config.rows, 3))


@NEEDS_TRITON
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["vector", "matrix", "matrix, weights first"])
def test_bias_and_other_dtype(form: Form, name: str) -> None:
    check(form, CONFIGS[name], num_rows=2, has_bias=True, dtype=torch.float16)


@NEEDS_TRITON
@pytest.mark.parametrize("name", ["vector", "matrix", "matrix, weights first"])
@pytest.mark.parametrize("num_out", [16, 18, 50])
@pytest.mark.parametrize("num_in", [64, 256, 1096])
def test_shapes_that_do_not_divide(name: str, num_out: int, num_in: int) -> None:
    check("gated", CONFIGS[name], num_rows=2, num_in=num_in, num_out=2 * num_out)


@NEEDS_TRITON
@pytest.mark.parametrize("num_rows", [1, 3, 4, 16])
def test_numbers_of_rows(num_rows: int) -> None:
    rows = 1 << (num_rows - 1).bit_length()
    check("add", dataclasses.replace(VECTOR, rows=rows), num_rows=num_rows)
    check("norm", dataclasses.replace(MATRIX, rows=max(rows, 16)), num_rows=num_rows)


@NEEDS_TRITON
def test_the_same_rows_give_the_same_bits() -> None:
    from eyas.kernels import triton_linear

    x, weight, keywords = arguments(
        "norm", num_rows=3, num_in=320, num_out=36, dtype=torch.bfloat16
    )
    config = dataclasses.replace(VECTOR, rows=4)
    first, second = (triton_linear.linear(x, weight, config=config, **keywords) for _ in range(2))
    assert torch.equal(first, second)


@NEEDS_TRITON
def test_rows_do_not_depend_on_one_another() -> None:
    from eyas.kernels import triton_linear

    x, weight, keywords = arguments("norm", num_rows=4, num_in=320, num_out=36, dtype=torch.float16)
    config = dataclasses.replace(VECTOR, rows=4)
    together = triton_linear.linear(x, weight, config=config, **keywords)
    alone = triton_linear.linear(x[2:3], weight, config=config, **keywords)
    assert torch.equal(together[2:3], alone)


@NEEDS_TRITON
def test_what_is_accepted() -> None:
    from eyas.kernels import triton_linear

    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    assert triton_linear.accepts(weight, weight)
    assert not triton_linear.accepts(weight.float(), weight.float())
    assert not triton_linear.accepts(weight.half(), weight)
    assert not triton_linear.accepts(weight, weight.T)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64])
def test_the_search_space(form: Form, rows: int) -> None:
    for wide in (False, True):
        space = list(search_space(form, rows=rows, wide=wide))
        assert space and len(set(space)) == len(space)
        assert all(config.rows >= rows for config in space)
        assert all(config.kind == "matrix" for config in space) or rows <= 4
        assert not any(config.norm_apart for config in space) or form in ("norm", "gated")
    assert not list(search_space(form, rows=128))


def test_a_configuration_larger_than_the_layer_does_not_fit() -> None:
    assert MATRIX.fits("plain", num_out=16, num_in=64)
    assert not MATRIX.fits("plain", num_out=8, num_in=64)
    assert not MATRIX.fits("plain", num_out=16, num_in=32)
    assert not MATRIX.fits("gated", num_out=16, num_in=64)
    assert not MATRIX.fits("gated", num_out=33, num_in=64)


def test_buckets_of_rows() -> None:
    found = {num_rows: row_bucket(num_rows) for num_rows in (1, 2, 3, 5, 16, 17, 64, 65)}
    assert found == {1: 1, 2: 2, 3: 4, 5: 16, 16: 16, 17: 64, 64: 64, 65: None}


def test_a_plan() -> None:
    plan = LinearPlan({("norm", 4): VECTOR, ("norm", 16): None})
    assert plan.config("norm", 3) is VECTOR and plan.config("norm", 10) is None
    assert plan.config("norm", 1) is None and plan.config("add", 4) is None
    assert plan.config("norm", 1000) is None
