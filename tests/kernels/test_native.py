"""The C kernels against the torch reference, and what happens where they cannot be built.

Shape suffixes as in eyas.kernels.native.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas import kernels
from eyas.kernels import native, native_build, reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """fp32 to a few last places; bf16 to one rounding, of 2^-8."""
    tolerance = 3e-6 if expected.dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def needs_library() -> None:
    if not native.status().startswith("native"):
        pytest.skip(native.status())


@pytest.fixture
def library() -> None:
    """Skips where there is no compiler: nothing native to be tested then."""
    needs_library()


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values dense, as the left part of wider rows, and as heads within wider rows."""
    wide = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)
    heads = torch.stack((x, x + 1, x - 1), dim=1)
    return {"dense": x, "columns": wide[:, : x.shape[1]], "heads": heads[:, :2]}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 24, 64, 576, 1000])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    weight_H = random(size, dtype=dtype, seed=1)
    for num_rows in (1, 2, 7, 70):
        for x in layouts(3 * random(num_rows, size, dtype=dtype)).values():
            out = native.rms_norm(x, weight_H, 1e-5)
            assert out is not None and out.is_contiguous()
            assert_close(out, reference.rms_norm(x, weight_H, 1e-5))
            torch.testing.assert_close(out, kernels.rms_norm(x, weight_H, 1e-5), rtol=0, atol=0)


@pytest.mark.usefixtures("library")
def test_rms_norm_keeps_nan_and_leaves_the_rest_to_torch() -> None:
    x, weight_H = random(2, 32, dtype=torch.float32), torch.ones(32)
    x[0, 5] = float("nan")
    out = native.rms_norm(x, weight_H, 1e-5)
    assert out is not None and out[0].isnan().all() and out[1].isfinite().all()
    assert native.rms_norm(x.t()[:2], torch.ones(2), 1e-5) is None
    assert native.rms_norm(x, weight_H.double(), 1e-5) is None
    assert native.rms_norm(torch.zeros(1 << 15, 32), weight_H, 1e-5) is None
    for other in (torch.float64, torch.float16):
        assert not native.accepts(x.to(other))
    assert not native.accepts(torch.empty(2, device="meta"))
    assert native.accepts(x)
    with native.disabled():
        assert not native.accepts(x)
    with torch.inference_mode(False), torch.enable_grad():
        assert not native.accepts(torch.ones(2))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 24, 576, 1000])
def test_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    weight_H = random(size, dtype=dtype, seed=2)
    for num_rows in (1, 3, 70):
        x, delta = random(num_rows, size, dtype=dtype), random(num_rows, size, dtype=dtype, seed=1)
        both = native.add_rms_norm(x, delta, weight_H, 1e-5)
        assert both is not None
        total, out = reference.add_rms_norm(x, delta, weight_H, 1e-5)
        torch.testing.assert_close(both[0], total, rtol=0, atol=0)
        assert_close(both[1], out)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 24, 1536])
def test_silu_mul(size: int, dtype: torch.dtype) -> None:
    for num_rows in (1, 5, 20):
        x = 6 * random(num_rows, 2 * size, dtype=dtype)
        x[0, 0] = 60.0
        x[-1, 0] = -60.0
        out = native.silu_mul(x)
        assert out is not None
        assert_close(out, reference.silu_mul(x))
    x[0, 0] = float("nan")
    out = native.silu_mul(x)
    assert out is not None and out[0, 0].isnan() and out[1:].isfinite().all()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 1000])
def test_argmax(size: int, dtype: torch.dtype) -> None:
    """Ties, NaN and infinities as torch has them, wherever they stand."""
    x = random(60, size, dtype=torch.float32).mul(2).round().to(dtype)
    g = torch.Generator().manual_seed(1)
    place = torch.randint(size, (60, 2), generator=g)
    for row, value in ((0, float("nan")), (20, float("inf"))):
        some = torch.arange(row, row + 10)
        x[some[:, None], place[some]] = value
    x[30:35] = float("-inf")
    x[35:37] = float("nan")
    out = native.argmax(x)
    assert out is not None and out.tolist() == x.argmax(-1).tolist()
    torch.testing.assert_close(kernels.choose_tokens(x, torch.zeros(60), None), out)
    assert native.argmax(x.t()) is None or size == 1


# ---- building ----

STATUS = "from eyas.kernels import native; print(native.status())"


def status_in(cache: Path, **environment: str) -> subprocess.Popen[str]:
    """A fresh process that loads the library with a cache of its own."""
    env = os.environ | {"EYAS_CACHE": str(cache), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(
        [sys.executable, "-c", STATUS], env=env, stdout=subprocess.PIPE, text=True
    )


def fresh(monkeypatch: pytest.MonkeyPatch, cache: Path) -> native_build.NativeLibrary:
    monkeypatch.setenv("EYAS_CACHE", str(cache))
    monkeypatch.delenv("EYAS_NATIVE", raising=False)
    return native_build.NativeLibrary()


def test_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = fresh(monkeypatch, tmp_path)
    assert made.status == "not loaded yet"
    monkeypatch.setenv("EYAS_NATIVE", "0")
    assert made.get() is None and made.status == "torch reference (EYAS_NATIVE=0)"
    assert not any(tmp_path.iterdir())


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = fresh(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert made.get() is None and made.status == "torch reference (no C compiler found)"


@pytest.mark.parametrize("works_for_version", [True, False])
def test_a_compiler_that_fails(
    works_for_version: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = fresh(monkeypatch, tmp_path / "cache")
    compiler = tmp_path / "badcc"
    version = '[ "$1" = --version ] && echo bad 1.0 && exit 0\n' if works_for_version else ""
    compiler.write_text(f"#!/bin/sh\n{version}echo 'x.c:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert made.get() is None
    assert made.status == f"torch reference ({compiler} failed: x.c:1: error: no such thing)"
    assert not list(tmp_path.rglob("*.so"))


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs_library()
    (tmp_path / "file").touch()
    made = fresh(monkeypatch, tmp_path / "file")
    assert made.get() is None and made.status.startswith("torch reference (")


def test_a_damaged_library_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And two processes that build at once do not disturb each other."""
    needs_library()
    both = [status_in(tmp_path), status_in(tmp_path)]
    texts = [process.communicate(timeout=300)[0] for process in both]
    assert all(text.startswith("native") for text in texts)
    (path,) = tmp_path.rglob("*.so")
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    text, _ = status_in(tmp_path).communicate(timeout=300)
    assert text.startswith("native") and len(path.read_bytes()) == len(whole)
    before = path.stat().st_mtime_ns
    made = fresh(monkeypatch, tmp_path)
    assert made.get() is not None and path.stat().st_mtime_ns == before


@pytest.mark.usefixtures("library")
def test_the_switch_leaves_the_reference_in_charge(tmp_path: Path) -> None:
    text, _ = status_in(tmp_path, EYAS_NATIVE="0").communicate(timeout=300)
    assert text.strip() == "torch reference (EYAS_NATIVE=0)"
