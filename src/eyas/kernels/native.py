"""Entry points of native.c: what takes the place of many small torch calls when rows are few.

Used for fp32 and bf16 tensors on the CPU while no gradients are recorded; a call here costs about
two microseconds, as one torch operation does. Everything else stays with the reference, and so
does work that is large enough for several threads to win (each entry states its limit).

Shape suffixes: T rows, H hidden, I intermediate, E width of the fused projection, R rows of the
cache, B requests, Q query rows a request (T = B * Q), S rows read, K key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from eyas.kernels.native_build import NativeLibrary

# One pass by one thread against several passes by all: measured even at about this many elements.
MAX_ELEMENTS = 1 << 19
# The exponentials of silu take time of their own, which two threads halve.
MAX_GATED_ELEMENTS = 1 << 16
_Pointer, _Count, _Real = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float
_SIGNATURES = {
    "rms_norm": [_Pointer] * 3 + [_Count] * 4 + [_Real],
    "add_rms_norm": [_Pointer] * 5 + [_Count] * 2 + [_Real],
    "silu_mul": [_Pointer] * 2 + [_Count] * 3,
    "argmax": [_Pointer] * 2 + [_Count] * 2,
}
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class _Functions:
    """The C functions with their argument types; those of two forms by dtype."""

    rms_norm: dict[torch.dtype, Any]
    add_rms_norm: dict[torch.dtype, Any]
    silu_mul: dict[torch.dtype, Any]
    argmax: dict[torch.dtype, Any]

    def __init__(self, library: ctypes.PyDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            by_dtype = {d: getattr(library, f"{name}_{suffix}") for d, suffix in _SUFFIXES.items()}
            for function in by_dtype.values():
                function.argtypes, function.restype = arguments, None
            setattr(self, name, by_dtype)


_LIBRARY = NativeLibrary()
_functions: _Functions | None = None
_state = "unloaded"  # then "on" or "off"


def _load() -> bool:
    global _functions, _state
    library = _LIBRARY.get()
    _functions = None if library is None else _Functions(library)
    _state = "off" if library is None else "on"
    return library is not None


def status() -> str:
    """What computes on a CPU, and why, in one line; loads (or builds) the library."""
    if _state == "unloaded":
        _load()
    return _LIBRARY.status


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """The torch reference alone, inside (for comparisons)."""
    global _state
    before, _state = _state, "off"
    try:
        yield
    finally:
        _state = before


def accepts(x: Tensor) -> bool:
    """Whether a tensor's kind is served here at this moment."""
    if not x.is_cpu or _state == "off" or torch.is_grad_enabled():
        return False
    if x.dtype not in _SUFFIXES or type(x) is not Tensor:
        return False
    return _state == "on" or _load()


def accepts_indices(index: Tensor) -> bool:
    """Whether int64 numbers are: as `accepts`."""
    if not index.is_cpu or _state == "off" or torch.is_grad_enabled():
        return False
    if index.dtype is not torch.int64 or type(index) is not Tensor:
        return False
    return _state == "on" or _load()


def entry(name: str, *arguments: Any, result: Any = None) -> Any:
    """A function of the library by its name and argument types; None where there is no library."""
    library = _LIBRARY.get()
    if library is None:
        return None
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    return function


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor | None:
    """As the reference; None for a layout or dtype that is left to it, or over MAX_ELEMENTS."""
    size, num_elements = x_TH.shape[-1], x_TH.numel()
    if weight_H.dtype is not x_TH.dtype or num_elements > MAX_ELEMENTS or not num_elements:
        return None
    if x_TH.is_contiguous():
        outer, inner, stride = num_elements // size, 1, size
    elif x_TH.dim() == 2 and x_TH.stride(1) == 1:
        outer, inner, stride = len(x_TH), 1, x_TH.stride(0)
    elif x_TH.dim() == 3 and x_TH.stride(2) == 1 and x_TH.stride(1) == size:
        outer, inner, stride = len(x_TH), x_TH.shape[1], x_TH.stride(0)
    else:
        return None
    # Dense, whatever the layout of x; empty_like is the quicker of the two where both would do.
    out_TH = torch.empty_like(x_TH) if inner == 1 and stride == size else x_TH.new_empty(x_TH.shape)
    assert _functions is not None and weight_H.is_contiguous()
    _functions.rms_norm[x_TH.dtype](
        x_TH.data_ptr(), weight_H.data_ptr(), out_TH.data_ptr(), outer, inner, stride, size, eps
    )
    return out_TH


def add_rms_norm(
    x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    """As the reference; None for what is left to it."""
    num_elements, dtype = x_TH.numel(), x_TH.dtype
    if num_elements > MAX_ELEMENTS or not num_elements or x_TH.shape != delta_TH.shape:
        return None
    if weight_H.dtype is not dtype or delta_TH.dtype is not dtype:
        return None
    if not (x_TH.is_contiguous() and delta_TH.is_contiguous()):
        return None
    assert _functions is not None and weight_H.is_contiguous()
    total_TH, out_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
    size = x_TH.shape[-1]
    _functions.add_rms_norm[dtype](
        x_TH.data_ptr(),
        delta_TH.data_ptr(),
        weight_H.data_ptr(),
        total_TH.data_ptr(),
        out_TH.data_ptr(),
        num_elements // size,
        size,
        eps,
    )
    return total_TH, out_TH


def silu_mul(gate_up_TI: Tensor) -> Tensor | None:
    """As the reference; None for what is left to it."""
    num_elements = gate_up_TI.numel()
    if num_elements > MAX_GATED_ELEMENTS or not num_elements or not gate_up_TI.is_contiguous():
        return None
    width, dtype = gate_up_TI.shape[-1], gate_up_TI.dtype
    if width % 2:
        return None
    out_TI = torch.empty((*gate_up_TI.shape[:-1], width // 2), dtype=dtype)
    assert _functions is not None
    _functions.silu_mul[dtype](
        gate_up_TI.data_ptr(), out_TI.data_ptr(), num_elements // width, width, width // 2
    )
    return out_TI


def argmax(x_RV: Tensor) -> Tensor | None:
    """x.argmax(-1) of rows, the first of equals and NaN above all; None for other layouts.

    No limit: one thread here is quicker than torch's on any number of rows that a host serves.
    """
    if x_RV.dim() != 2 or not x_RV.is_contiguous() or not x_RV.numel():
        return None
    num_rows, size = x_RV.shape
    out_R = torch.empty(num_rows, dtype=torch.int64)
    assert _functions is not None
    _functions.argmax[x_RV.dtype](x_RV.data_ptr(), out_R.data_ptr(), num_rows, size)
    return out_R
