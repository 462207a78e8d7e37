"""Entry points of native_draft.c: a small draft's step for few rows in one call.

The torch modules take some twenty operations for a step, most of whose time is the calls; here it
is one call, whose products are spread over torch's own threads. bf16 only. What is left then is the
time to read the weights, so that they are kept as int8 beside the modules' own. A draft only
proposes: its rounding cannot change the output, and costs no acceptance that could be measured.

Shape suffixes: T rows, H hidden, I MLP width, V draft vocabulary, N tokens of the embedding,
P positions, D rotary width, F captured features, K key/value heads, R rows of the cache.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from typing import Any, Protocol

import torch
from torch import Tensor

from eyas.kernels import native

MAX_ROWS = 8  # more rows are work enough for torch's products
MAX_WEIGHTS = 1 << 26  # of all products but the head: a larger draft has no use for it
_UNIT = 16  # widths are multiples of it
_Pointer, _Count = ctypes.c_void_p, ctypes.c_ssize_t
_PRODUCTS = ("qkv", "o", "gate_up", "down", "head")
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm's weight and epsilon."""

    weight: Tensor
    eps: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """A draft of Llama type without biases; weights [out, in], contiguous. qkv, gate_up: stacked
    as the merged projections are. fc: None where norms come before it, or a bias after."""

    embed_NH: Tensor
    input_norm: Norm
    hidden_norm: Norm
    post_norm: Norm
    last_norm: Norm
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    head_VH: Tensor
    fc: Tensor | None
    cos_PD: Tensor
    sin_PD: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_before_residual: bool
    norm_output: bool

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        norms = (self.input_norm, self.hidden_norm, self.post_norm, self.last_norm)
        found = [self.embed_NH, self.qkv, self.o, self.gate_up, self.down, self.head_VH]
        found += [self.cos_PD, self.sin_PD, *(norm.weight for norm in norms)]
        return found if self.fc is None else [*found, self.fc]


class Place(Protocol):
    """Where a step attends: contract.attention.Attention of few rows (attention.torch_backend)."""

    def few_rows(self, layer: int, q_THD: Tensor) -> tuple[int, Tensor, Tensor, Tensor] | None:
        """(address of the plan, write_T, keys, values), or None."""

    def written_rows(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """(write_T, keys, values)."""


class _DraftPlan(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("embed", "input_norm", "hidden_norm", "post_norm")),
        ("last_norm", _Pointer),
        *((f"{name}{part}", _Pointer) for name in _PRODUCTS for part in ("", "_scale", "_sum")),
        *((name, _Pointer) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "kv_heads", "size")),
        *((name, ctypes.c_int64) for name in ("v_size", "rotary", "vocab")),
        *((name, ctypes.c_int64) for name in ("norm_before_residual", "norm_output")),
        *((name, ctypes.c_float) for name in ("input_eps", "hidden_eps", "post_eps", "last_eps")),
    ]


@functools.cache
def _entry(name: str) -> Any:
    """A function of the library, which is told of torch's threads first; None without library."""
    _use_threads()
    arguments: dict[str, list[Any]] = {
        "draft_step": [*[_Pointer] * 11, *[_Count] * 2],
        "draft_write": [*[_Pointer] * 8, *[_Count] * 4],
        "int8_product": [*[_Pointer] * 6, *[_Count] * 5],
    }
    return native.entry(name, *arguments[name])


@functools.cache
def _use_threads() -> None:
    """Hand over the OpenMP runtime that is in this process, which is torch's."""
    process = ctypes.CDLL(None)
    if all(hasattr(process, name) for name in _OPENMP):
        pointers = [ctypes.cast(getattr(process, name), _Pointer) for name in _OPENMP]
        use = native.entry("use_threads", *[_Pointer] * 3)
        if use is not None:
            use(*pointers)


@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """A weight [O, I] in int8; of each row its scale (fp32) and its sum (int32)."""

    weight_OI: Tensor
    scale_O: Tensor
    sum_O: Tensor

    @staticmethod
    def of(weight_OI: Tensor) -> Int8Weight:
        """Each row in 127ths of its largest weight."""
        rounded_OI = torch.empty(weight_OI.shape, dtype=torch.int8)
        scale_O = torch.empty(len(weight_OI))
        for start in range(0, len(weight_OI), 4096):  # no fp32 copy of the whole
            rows = weight_OI[start : start + 4096].float()
            scale = rows.abs().amax(1).clamp(min=1e-30) / 127
            scale_O[start : start + 4096] = scale
            rounded_OI[start : start + 4096] = (rows / scale[:, None]).round().to(torch.int8)
        return Int8Weight(rounded_OI, scale_O, rounded_OI.sum(1, dtype=torch.int32))

    @property
    def pointers(self) -> tuple[int, int, int]:
        """Of the weight, its scales and its sums."""
        return self.weight_OI.data_ptr(), self.scale_O.data_ptr(), self.sum_O.data_ptr()

    def product(self, x_TI: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """x W^T [T, O] of bf16 rows, which are rounded to 32512ths of their largest element; I is
        a multiple of 16. dtype: bf16 or fp32, of the result."""
        (num_out, num_in), num_rows = self.weight_OI.shape, len(x_TI)
        x_TI = x_TI.contiguous()
        y_TO = torch.empty(num_rows, num_out, dtype=dtype)
        work = torch.empty(num_rows * (num_in + 2) + 96, dtype=torch.bfloat16)
        _entry("int8_product")(
            *self.pointers,
            x_TI.data_ptr(),
            y_TO.data_ptr(),
            work.data_ptr(),
            dtype is torch.bfloat16,
            num_in,
            num_out,
            num_rows,
            torch.get_num_threads(),
        )
        return y_TO


def plan_draft_step(weights: DraftWeights) -> DraftStep | None:
    """The step of a draft, or None where it is left to the modules: no library, another dtype,
    device or width, or a draft so large that calls are no part of its time."""
    products = (weights.qkv, weights.o, weights.gate_up, weights.down)
    if sum(w.numel() for w in products) > MAX_WEIGHTS:
        return None
    widths = [weights.head_VH.shape[1], *(w.shape[1] for w in products)]
    with torch.inference_mode():
        fits = all(
            t.dtype is torch.bfloat16 and t.is_contiguous() and native.accepts(t.detach())
            for t in weights.tensors
        )
        if not fits or any(width % _UNIT for width in widths):
            return None
        return DraftStep(weights)


def _accepts(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and native.accepts(x)


class DraftStep:
    """One draft's step. Its buffers are used again by every call: not for several threads."""

    def __init__(self, weights: DraftWeights) -> None:
        w = weights
        products = [Int8Weight.of(one) for one in (w.qkv, w.o, w.gate_up, w.down, w.head_VH)]
        self._fc = None
        if w.fc is not None and w.fc.shape[1] % _UNIT == 0:
            self._fc = Int8Weight.of(w.fc)
        norms = (w.input_norm, w.hidden_norm, w.post_norm, w.last_norm)
        self._hidden, self._vocab = w.head_VH.shape[1], len(w.head_VH)
        v_size = w.o.shape[1] // w.num_heads
        self._plan = _DraftPlan(
            w.embed_NH.data_ptr(),
            *(norm.weight.data_ptr() for norm in norms),
            *itertools.chain(*(one.pointers for one in products)),
            *(t.data_ptr() for t in (w.cos_PD, w.sin_PD)),
            hidden=self._hidden,
            inner=w.down.shape[1],
            heads=w.num_heads,
            kv_heads=w.num_kv_heads,
            size=w.head_dim,
            v_size=v_size,
            rotary=w.cos_PD.shape[-1],
            vocab=self._vocab,
            norm_before_residual=w.norm_before_residual,
            norm_output=w.norm_output,
            **{
                f"{name}_eps": norm.eps
                for name, norm in zip(("input", "hidden", "post", "last"), norms, strict=True)
            },
        )
        # The plan holds bare pointers.
        small = (w.embed_NH, w.cos_PD, w.sin_PD, *(norm.weight for norm in norms))
        self._kept = (*small, products)
        self._address = ctypes.addressof(self._plan)
        num_elements = native.entry("draft_work", _Pointer, _Count, result=_Count)(
            self._address, MAX_ROWS
        )
        self._work = torch.empty(num_elements, dtype=torch.bfloat16)
        self._q_THD = torch.empty(MAX_ROWS, w.num_heads, w.head_dim, dtype=torch.bfloat16)
        self._step, self._write = _entry("draft_step"), _entry("draft_write")

    def __call__(
        self, tokens_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, place: Place
    ) -> tuple[Tensor, Tensor] | None:
        """(logits fp32 [T, V], what is fed back [T, H]); None where the modules are to do it."""
        num_rows = len(tokens_T)
        if num_rows > MAX_ROWS or not _accepts(hidden_TH):
            return None
        found = place.few_rows(0, self._q_THD)
        if found is None:
            return None
        plan, write_T, k_RKD, v_RKD = found
        tokens_T, positions_T = tokens_T.contiguous(), positions_T.contiguous()
        hidden_TH = hidden_TH.contiguous()
        out_TH = torch.empty_like(hidden_TH)
        logits_TV = torch.empty(num_rows, self._vocab)
        self._step(
            self._address,
            plan,
            tokens_T.data_ptr(),
            hidden_TH.data_ptr(),
            positions_T.data_ptr(),
            write_T.data_ptr(),
            k_RKD.data_ptr(),
            v_RKD.data_ptr(),
            out_TH.data_ptr(),
            logits_TV.data_ptr(),
            self._work.data_ptr(),
            num_rows,
            torch.get_num_threads(),
        )
        return logits_TV, out_TH

    def write(self, tokens_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, place: Place) -> bool:
        """Store keys and values of the pairs; False where the modules are to do it."""
        num_rows = len(tokens_T)
        if num_rows > MAX_ROWS or not _accepts(hidden_TH):
            return False
        write_T, k_RKD, v_RKD = place.written_rows(0)
        if k_RKD.dtype is not torch.bfloat16:
            return False
        tokens_T, positions_T = tokens_T.contiguous(), positions_T.contiguous()
        hidden_TH, write_T = hidden_TH.contiguous(), write_T.contiguous()
        self._write(
            self._address,
            tokens_T.data_ptr(),
            hidden_TH.data_ptr(),
            positions_T.data_ptr(),
            write_T.data_ptr(),
            k_RKD.data_ptr(),
            v_RKD.data_ptr(),
            self._work.data_ptr(),
            k_RKD.stride(0),
            v_RKD.stride(0),
            num_rows,
            torch.get_num_threads(),
        )
        return True

    def combine(self, features_TF: Tensor) -> Tensor | None:
        """s = fc(features) [T, H]; None where the modules are to do it."""
        if self._fc is None or len(features_TF) > MAX_ROWS or not _accepts(features_TF):
            return None
        return self._fc.product(features_TF)
