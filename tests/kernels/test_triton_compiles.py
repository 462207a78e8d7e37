"""Norms and linears as a GPU's compiler takes them: wide loads, matrix units, dependent launch."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fixtures.compile_only import compiling_for

from eyas.kernels.linear_config import Form, LinearConfig, search_space

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the compiler of triton"
)
NUM_IN, NUM_OUT = 4096, 1024


@pytest.fixture(params=[True, False], ids=["dependent launch", "plain launch"])
def dependent(request: pytest.FixtureRequest) -> Iterator[bool]:
    from eyas.kernels import triton_launch

    triton_launch.use_pdl(request.param)
    yield request.param
    triton_launch.use_pdl(None)


def empty(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def compile_linear(form: Form, config: LinearConfig, capability: int) -> Any:
    """The last kernel of a form: with a norm apart, the product."""
    from eyas.kernels import triton_linear

    norm = (empty(NUM_IN), 1e-5) if form in ("norm", "gated") else None
    with compiling_for(capability) as compiled:
        triton_linear.linear(
            empty(config.rows, NUM_IN),
            empty(NUM_OUT, NUM_IN),
            config=config,
            norm=norm,
            residual_TO=empty(config.rows, NUM_OUT) if form == "add" else None,
            is_gated=form == "gated",
        )
    return compiled[-1]


@pytest.mark.parametrize("form", ["norm", "add", "gated"])
def test_one_row_reads_weights_sixteen_bytes_at_a_time(form: Form, dependent: bool) -> None:
    config = next(iter(search_space(form, rows=1)))
    kernel = compile_linear(form, config, 90)
    ttgir, ptx = kernel.asm["ttgir"], kernel.asm["ptx"]
    assert ptx.count("ld.global.L1::evict_first") == ptx.count("evict_first.L2::cache_hint.v4.b32")
    assert ttgir.count("ttg.convert_layout") == 1  # of the result, just before it is stored
    assert ("griddepcontrol.wait" in ptx) == dependent


@pytest.mark.parametrize("form", ["norm", "gated"])
def test_several_rows_go_to_matrix_units(form: Form, dependent: bool) -> None:
    for config in search_space(form, rows=16):
        ptx = compile_linear(form, config, 90).asm["ptx"]
        assert "wgmma" in ptx or "mma.sync" in ptx
        assert "cp.async" in ptx and ("prefetch.global.L2" in ptx) == dependent


def test_an_older_gpu(dependent: bool) -> None:
    if dependent:
        pytest.skip("it has no dependent launch")
    for rows in (1, 16):
        assert "ptx" in compile_linear("add", next(iter(search_space("add", rows=rows))), 80).asm


def test_norms(dependent: bool) -> None:
    from eyas.kernels import triton_norm

    x, weight = empty(4, NUM_IN), empty(NUM_IN)
    with compiling_for(90) as compiled:
        triton_norm.rms_norm(x, weight, 1e-5)
        triton_norm.add_rms_norm(x, x, weight, 1e-5)
        norms = ((weight, 1e-5), (weight, 1e-6))
        triton_norm.pair_norm(torch.zeros(4, dtype=torch.int64), x, x, norms=norms)
        triton_norm.silu_mul(x)
    assert len(compiled) == 4
    for kernel in compiled:
        assert "ld.global.v4.b32" in kernel.asm["ptx"]
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == dependent
