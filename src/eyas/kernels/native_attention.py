"""Attention and rotation of native.c for few rows of a paged cache, planned once a forward.

Shape suffixes: T rows, E width of the fused projection, R rows of the cache, B requests, Q query
rows a request (T = B * Q), S rows read, N scratch nodes, P pages, K key/value heads, D head size.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from eyas.kernels import native

MAX_QUERIES = 64  # rows of a request: a tree's, not a prompt chunk's
_WIDTH = 16  # of a vector in native.h
_Pointer, _Count, _Real = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float


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


class _TreePlan(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("table", "slots", "end", "visible")),
        *((name, ctypes.c_int64) for name in ("table_stride", "visible_r", "visible_q")),
        *((name, ctypes.c_int64) for name in ("visible_n", "nodes", "first_index", "last_index")),
        *((name, ctypes.c_int64) for name in ("page_size", "first_scratch", "num_scratch")),
    ]


@functools.cache
def _entry(name: str) -> Any:
    """The library's function; only asked for where `native.accepts` has said yes."""
    arguments: dict[str, list[Any]] = {
        "rope_write": [_Pointer] * 5,
        "attend": [_Pointer] * 5,
        "attend_prepare": [_Pointer],
        "attend_tree": [_Pointer] * 2,
        "tree_write": [_Pointer, *[_Count] * 3, _Pointer],
    }
    return native.entry(name, *arguments[name])


def max_attention_work() -> int:
    """B * Q * S * heads * (D + Dv), multiplications, up to which one thread is no slower.

    Measured on two cores, where nothing gathered makes up for the second thread up to about 2^26;
    with many threads only torch's fixed cost, some 60 microseconds a layer, is to be gained.
    """
    return 1 << (26 if torch.get_num_threads() <= 2 else 22)


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
        self._function = _entry("rope_write")

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


class TreeRows:
    """B trees of Q query rows over paged prefixes, from their page tables (attention backends say
    what the arguments mean). write_T: int64 [B * Q], the scratch rows of the query rows."""

    def __init__(
        self,
        page_table_BP: Tensor,
        slots_B: Tensor,
        end_B: Tensor,
        visible_BQN: Tensor,
        *,
        first_index: int,
        last_index: int,
        first_node: int,
        page_size: int,
        scratch: tuple[int, int],
    ) -> None:
        num_requests, num_queries, num_nodes = visible_BQN.shape
        self.shape = (num_requests, num_queries, last_index - first_index + num_nodes)
        self.write_T = torch.empty(num_requests * num_queries, dtype=torch.int64)
        slots_B, end_B = slots_B.contiguous(), end_B.contiguous()
        self._kept = (page_table_BP, slots_B, end_B, visible_BQN)
        assert page_table_BP.stride(1) == 1
        self._plan = _TreePlan(
            page_table_BP.data_ptr(),
            slots_B.data_ptr(),
            end_B.data_ptr(),
            visible_BQN.data_ptr(),
            page_table_BP.stride(0),
            *visible_BQN.stride(),
            num_nodes,
            first_index,
            last_index,
            page_size,
            *scratch,
        )
        self.address = ctypes.addressof(self._plan)
        write = self.write_T.data_ptr()
        _entry("tree_write")(self.address, first_node, num_requests, num_queries, write)


class FewRowsAttention:
    """Attention of B * Q query rows over rows of a paged cache, for all layers of one forward.

    read: what the rows see, a Segment's rows and bias, or a tree; the rows of a tree are found from
    its page tables here. q: queries by example, [T, H, D]. A position that no query row of its
    request sees is never read; a row that sees nothing gives zeros.
    """

    def __init__(
        self,
        q_THD: Tensor,
        read: tuple[Tensor, Tensor] | TreeRows,
        cache: tuple[Tensor, Tensor],
    ) -> None:
        (k_RKD, v_RKD), num_heads, size = cache, q_THD.shape[1], q_THD.shape[2]
        num_kv_heads, v_size = k_RKD.shape[1], v_RKD.shape[2]
        if isinstance(read, TreeRows):
            num_requests, num_queries, num_read = read.shape
            sources: tuple[int | None, int | None] = (None, None)
            self._kept: tuple[Any, ...] = (read,)  # the plan holds bare pointers
        else:
            num_requests, num_queries, num_read = read[1].shape
            read = (read[0].contiguous(), read[1].contiguous())
            sources = (read[0].data_ptr(), read[1].data_ptr())
            self._kept = read
        reach = _padded(num_read)
        num_rows = num_queries * (num_heads // num_kv_heads)
        scratch = num_rows * (_padded(size) + reach + _padded(v_size)) + _padded(num_rows)
        scratch += _WIDTH * max(_padded(size), _padded(v_size))
        sizes = {  # bytes of the plan's work areas, each whole cache lines
            "count": 8 * num_requests,
            "rows": 8 * num_requests * reach,
            "added": 4 * num_requests * num_queries * reach,
            "mixed": num_requests * (reach // _WIDTH),
            "scratch": 4 * scratch,
        }
        areas, end = {}, 0
        for name, num_bytes in sizes.items():
            areas[name], end = end, end + -(-num_bytes // 64) * 64
        work = torch.empty(end, dtype=torch.uint8)
        self._kept += (work,)
        first = work.data_ptr()
        self._plan = _AttendPlan(
            *sources,
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
            is_bf16=q_THD.dtype == torch.bfloat16,
            scale=size**-0.5,
            **{name: first + start for name, start in areas.items()},
        )
        self.address = ctypes.addressof(self._plan)
        self._function = _entry("attend")
        if isinstance(read, TreeRows):
            _entry("attend_tree")(self.address, read.address)
        else:
            _entry("attend_prepare")(self.address)

    def __call__(self, q_THD: Tensor, k_RKD: Tensor, v_RKD: Tensor, out_TE: Tensor) -> None:
        """Fill out_TE [T, H * Dv] for queries laid out as those of the plan."""
        self._function(
            self.address,
            q_THD.data_ptr(),
            k_RKD.data_ptr(),
            v_RKD.data_ptr(),
            out_TE.data_ptr(),
        )


def _padded(count: int) -> int:
    return -(-count // _WIDTH) * _WIDTH
