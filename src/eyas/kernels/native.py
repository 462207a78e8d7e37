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
MAX_QUERIES = 64  # rows of a request: a tree's, not a prompt chunk's
MAX_ELEMENTS = 1 << 19
# The exponentials of silu take time of their own, which two threads halve.
MAX_GATED_ELEMENTS = 1 << 16
_WIDTH = 16  # of a vector in native.c
_Pointer, _Count, _Real = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float
_SIGNATURES = {
    "rms_norm": [_Pointer] * 3 + [_Count] * 4 + [_Real],
    "add_rms_norm": [_Pointer] * 5 + [_Count] * 2 + [_Real],
    "silu_mul": [_Pointer] * 2 + [_Count] * 3,
    "argmax": [_Pointer] * 2 + [_Count] * 2,
}
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class _RopePlan(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("cos", "sin", "write")),
        *((name, ctypes.c_int64) for name in ("rows", "stride", "num_q", "num_k", "size")),
        *((name, ctypes.c_int64) for name in ("v_size", "rotary", "k_stride", "v_stride")),
        ("is_bf16", ctypes.c_int64),
    ]


class _AttendPlan(ctypes.Structure):
    _fields_ = [
        ("read", _Pointer),
        ("bias", _Pointer),
        *((name, ctypes.c_int64) for name in ("requests", "queries", "num_read", "heads")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "size", "v_size", "q_stride")),
        *((name, ctypes.c_int64) for name in ("k_stride", "v_stride", "is_bf16")),
        ("scale", _Real),
        *((name, _Pointer) for name in ("count", "rows", "added", "mixed", "scratch")),
    ]


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
        self.rope_write, self.attend = library.rope_write, library.attend
        for function in (self.rope_write, self.attend):
            function.argtypes, function.restype = [_Pointer] * 5, None
        self.attend_prepare = library.attend_prepare
        self.attend_prepare.argtypes, self.attend_prepare.restype = [_Pointer], None


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


def max_attention_work() -> int:
    """B * Q * S * heads * (D + Dv), multiplications, up to which one thread is no slower.

    Measured on two cores, where nothing gathered makes up for the second thread up to about 2^26;
    with many threads only torch's fixed cost, some 60 microseconds a layer, is to be gained.
    """
    return 1 << (26 if torch.get_num_threads() <= 2 else 22)


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


class RopeWriter:
    """Rotates q and k of a fused projection and stores k and v, for all layers of one forward.

    cos, sin: [T, 1, rotary] as kernels.apply_rope takes them. write_T: int64 rows of the cache.
    num_heads: query heads; the key/value heads are those of the cache.
    """

    def __init__(
        self,
        rotary: tuple[Tensor, Tensor],
        write_T: Tensor,
        cache: tuple[Tensor, Tensor],
        *,
        num_heads: int,
    ) -> None:
        (cos, sin), (k_RKD, v_RKD) = (t.contiguous() for t in rotary), cache
        self._kept = (cos, sin, write_T.contiguous())  # the plan holds bare pointers
        self._shape = (len(write_T), num_heads, k_RKD.shape[2])
        num_kv_heads = k_RKD.shape[1]
        width = (num_heads + num_kv_heads) * k_RKD.shape[2] + num_kv_heads * v_RKD.shape[2]
        self._plan = _RopePlan(
            *(t.data_ptr() for t in self._kept),
            rows=len(write_T),
            stride=width,
            num_q=num_heads,
            num_k=num_kv_heads,
            size=k_RKD.shape[2],
            v_size=v_RKD.shape[2],
            rotary=cos.shape[-1],
            k_stride=k_RKD.stride(0),
            v_stride=v_RKD.stride(0),
            is_bf16=cos.dtype == torch.bfloat16,
        )
        self._address = ctypes.addressof(self._plan)
        self._width = width
        assert _functions is not None
        self._function = _functions.rope_write

    def __call__(self, qkv_TE: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        """Write one layer's rows; returns q [T, H, D], rotated."""
        qkv_TE = qkv_TE.contiguous()
        assert qkv_TE.shape == (self._shape[0], self._width) and qkv_TE.dtype is k_RKD.dtype
        q_THD = torch.empty(self._shape, dtype=qkv_TE.dtype)
        self._function(
            self._address,
            qkv_TE.data_ptr(),
            q_THD.data_ptr(),
            k_RKD.data_ptr(),
            v_RKD.data_ptr(),
        )
        return q_THD


class FewRowsAttention:
    """Attention of B * Q query rows over rows of a paged cache, for all layers of one forward.

    read_T: int64 cache rows [B * S]; bias_BQS: added to the scores. A position whose bias is -inf
    for all query rows of a request is never read; a row that sees nothing gives zeros.
    """

    def __init__(
        self, q_THD: Tensor, read_T: Tensor, bias_BQS: Tensor, cache: tuple[Tensor, Tensor]
    ) -> None:
        num_requests, num_queries, num_read = bias_BQS.shape
        (k_RKD, v_RKD), num_heads, size = cache, q_THD.shape[1], q_THD.shape[2]
        num_kv_heads, v_size = k_RKD.shape[1], v_RKD.shape[2]
        bias_BQS, read_T = bias_BQS.contiguous(), read_T.contiguous()
        reach = _padded(num_read)
        num_rows = num_queries * (num_heads // num_kv_heads)
        scratch = num_rows * (_padded(size) + reach + _padded(v_size)) + _padded(num_rows)
        scratch += _WIDTH * max(_padded(size), _padded(v_size))
        work = {
            "count": torch.empty(num_requests, dtype=torch.int64),
            "rows": torch.empty(num_requests * reach, dtype=torch.int64),
            "added": torch.empty(num_requests * num_queries * reach),
            "mixed": torch.empty(num_requests * (reach // _WIDTH), dtype=torch.uint8),
            "scratch": torch.empty(scratch),
        }
        self._kept = (read_T, bias_BQS, work)  # the plan holds bare pointers
        self._plan = _AttendPlan(
            read_T.data_ptr(),
            bias_BQS.data_ptr(),
            requests=num_requests,
            queries=num_queries,
            num_read=num_read,
            heads=num_heads,
            kv_heads=num_kv_heads,
            size=size,
            v_size=v_size,
            q_stride=q_THD.stride(0),
            k_stride=k_RKD.stride(0),
            v_stride=v_RKD.stride(0),
            is_bf16=bias_BQS.dtype == torch.bfloat16,
            scale=size**-0.5,
            **{name: tensor.data_ptr() for name, tensor in work.items()},
        )
        self._address = ctypes.addressof(self._plan)
        assert _functions is not None
        self._function = _functions.attend
        _functions.attend_prepare(self._address)

    def __call__(self, q_THD: Tensor, k_RKD: Tensor, v_RKD: Tensor, out_TE: Tensor) -> None:
        """Fill out_TE [T, H * Dv] for queries laid out as those of the plan."""
        self._function(
            self._address,
            q_THD.data_ptr(),
            k_RKD.data_ptr(),
            v_RKD.data_ptr(),
            out_TE.data_ptr(),
        )


def _padded(count: int) -> int:
    return -(-count // _WIDTH) * _WIDTH
