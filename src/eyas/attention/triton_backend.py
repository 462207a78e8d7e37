"""Attention by Triton kernels over the paged cache: the backend of GPUs (D8).

The same plans over the same pools as attention.torch_backend, which is its oracle. Latent
attention (a value that is part of its key) and fp64 go to that one, inside: a kernel for them will
take their place in `plan_tree` and `plan_prefill`.

A plan reaches the device when the first layer asks for it, as only then the number of query heads
is known; all layers share it. Lengths are never read by the host, and nothing depends on
max_kv_len: a captured graph serves any length.

Shape suffixes as in attention.torch_backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.attention.torch_backend import TorchAttention, TorchBackend
from eyas.cache.pool import KVPool
from eyas.contract.attention import Attention, HeadNorms
from eyas.kernels import triton_attention as tree_kernels
from eyas.kernels import triton_attention_plan as plan_kernels
from eyas.kernels import triton_attention_prefill as prefill_kernels
from eyas.kernels import triton_attention_rotate as rotate_kernels

Rotary = tuple[Tensor, Tensor]


class TritonAttention:
    """contract.attention.ProjectionAttention for one planned forward; see the plans below."""

    def __init__(self, backend: TritonBackend) -> None:
        self._backend, self._pool = backend, backend.pool
        self._write_T: Tensor | None = None

    def _rows(self) -> Tensor:
        assert self._write_T is not None
        return self._write_T

    def _prepare(self, num_groups: int) -> None:
        """Bring the plan to the device, once."""

    def rotate_and_write(
        self,
        layer: int,
        qkv_TE: Tensor,
        rotary: Rotary,
        *,
        num_heads: int,
        norms: HeadNorms | None = None,
    ) -> Tensor | None:
        """contract.attention.RotatingAttention; num_heads 0 stores keys and values alone."""
        cache = self._pool.layers[layer]
        if not self._serves(qkv_TE):
            return None
        self._prepare(num_heads // self._pool.layout.num_kv_heads)
        rotation = _rotation(rotary, norms)
        return rotate_kernels.rotate_write(
            qkv_TE, rotation, self._rows(), cache, num_heads=num_heads
        )

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store keys and values of the batch's rows."""
        unit = rotate_kernels.unit_rows
        rotate_kernels.store_rows(unit(k_TKD), unit(v_TKD), self._rows(), self._pool.layers[layer])

    def _serves(self, qkv_TE: Tensor) -> bool:
        return qkv_TE.dtype == self._pool.k_LRKD.dtype and qkv_TE.stride(-1) == 1

    def _groups(self, q_THD: Tensor) -> int:
        return q_THD.shape[1] // self._pool.layout.num_kv_heads

    def _scale(self, scale: float | None) -> float:
        return 1.0 / math.sqrt(self._pool.layout.head_dim) if scale is None else scale

    def attend(self, layer: int, q_THD: Tensor, *, scale: float | None = None) -> Tensor:
        """[T, H, D] -> [T, H * Dv]."""
        raise AssertionError("this plan only writes")


class _TreeAttention(TritonAttention):
    """Few rows a request: paged prefix and masked scratch tail."""

    def __init__(self, backend: TritonBackend, inputs: plan_kernels.TreeInputs) -> None:
        super().__init__(backend)
        self._inputs = inputs
        self._work: plan_kernels.TreeWork | None = None
        self._is_read = False

    def _rows(self) -> Tensor:
        if self._work is not None:
            return self._work.write_T
        if self._write_T is None:
            first, num_rows = self._inputs.first_node, self._inputs.visible_BQN.shape[1]
            node_Q = torch.arange(first, first + num_rows, device=self._inputs.slots_B.device)
            self._write_T = self._backend.scratch_rows(self._inputs.slots_B, node_Q).reshape(-1)
        return self._write_T

    def _planned(self, num_groups: int) -> plan_kernels.TreeWork:
        if self._work is None:
            backend = self._backend
            self._work = plan_kernels.plan_tree(
                self._inputs,
                backend.pool_shape,
                num_groups=num_groups,
                num_processors=backend.num_processors,
                shared_bytes=backend.shared_bytes,
                config=backend.config,
            )
        return self._work

    def _prepare(self, num_groups: int) -> None:
        if num_groups:
            self._planned(num_groups)

    def attend(self, layer: int, q_THD: Tensor, *, scale: float | None = None) -> Tensor:
        """[T, H, D] -> [T, H * Dv]."""
        q_THD = rotate_kernels.unit_rows(q_THD)
        strides = (q_THD.stride(0), q_THD.stride(1))
        return self._run(layer, q_THD, strides, self._groups(q_THD), self._scale(scale))

    def attend_projection(
        self,
        layer: int,
        qkv_TE: Tensor,
        rotary: Rotary,
        *,
        num_heads: int,
        norms: HeadNorms | None = None,
    ) -> Tensor | None:
        """contract.attention.ProjectionAttention: all in one launch."""
        if not self._serves(qkv_TE):
            return None
        layout = self._pool.layout
        num_groups, strides = num_heads // layout.num_kv_heads, (qkv_TE.stride(0), layout.head_dim)
        rotation = _rotation(rotary, norms)
        return self._run(layer, qkv_TE, strides, num_groups, self._scale(None), rotation)

    def _run(
        self,
        layer: int,
        rows: Tensor,
        strides: tuple[int, int],
        num_groups: int,
        scale: float,
        rotation: rotate_kernels.Rotation | None = None,
    ) -> Tensor:
        work, preloaded, self._is_read = self._planned(num_groups), self._is_read, True
        return tree_kernels.attend_tree(
            rows,
            strides,
            self._pool.layers[layer],
            work,
            self._backend.workspace,
            scale=scale,
            rotation=rotation,
            preloaded=preloaded,
        )


class _PrefillAttention(TritonAttention):
    """Prompt chunks, causal, all in one launch a layer."""

    def __init__(
        self,
        backend: TritonBackend,
        page_table_BP: Tensor,
        chunks: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        super().__init__(backend)
        self._page_table_BP, self._chunks = page_table_BP.contiguous(), list(chunks)
        self._chunks_C2 = prefill_kernels.to_device(prefill_kernels.list_chunks(chunks), device)
        self._write_T = prefill_kernels.prefill_write_rows(
            self._chunks_C2,
            self._page_table_BP,
            self._pool.page_size,
            sum(end - start for start, end in chunks),
        )
        self._work: prefill_kernels.PrefillWork | None = None

    def _planned(self, num_groups: int) -> prefill_kernels.PrefillWork:
        if self._work is None:
            longest = max(end - start for start, end in self._chunks)
            layout = self._pool.layout
            config = self._backend.prefill_config or prefill_kernels.choose_prefill_config(
                longest * num_groups,
                self._pool.k_LRKD.dtype,
                max(layout.head_dim, layout.v_head_dim),
                self._backend.shared_bytes,
            )
            items = prefill_kernels.list_items(self._chunks, num_groups, config.block_m)
            self._work = prefill_kernels.PrefillWork(
                page_table_BP=self._page_table_BP,
                page_size=self._pool.page_size,
                chunks_C2=self._chunks_C2,
                items_IF=prefill_kernels.to_device(items, self._chunks_C2.device),
                num_groups=num_groups,
                config=config,
            )
        return self._work

    def attend(self, layer: int, q_THD: Tensor, *, scale: float | None = None) -> Tensor:
        """[T, H, D] -> [T, H * Dv]."""
        q_THD = rotate_kernels.unit_rows(q_THD)
        return prefill_kernels.attend_prefill(
            q_THD,
            self._pool.layers[layer],
            self._planned(self._groups(q_THD)),
            scale=self._scale(scale),
        )


class _WriteAttention(TritonAttention):
    """Only stores."""

    def __init__(self, backend: TritonBackend, write_T: Tensor) -> None:
        super().__init__(backend)
        self._write_T = write_T.contiguous()


def _rotation(rotary: Rotary, norms: HeadNorms | None) -> rotate_kernels.Rotation:
    cos, sin = rotary
    if norms is None:
        return rotate_kernels.Rotation(cos, sin)
    return rotate_kernels.Rotation(cos, sin, norms.q_D, norms.k_D, norms.eps)


def _device_limits(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that one program may have)."""
    if device.type != "cuda":  # Triton's interpreter: any numbers do
        return 4, 64 * 1024
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    return properties.multi_processor_count, shared


class TritonBackend:
    """Plans attention over one pool. config, prefill_config: None chooses by shape.

    Plans of one backend run one after another (one stream): they share a workspace.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        config: plan_kernels.TreeConfig | None = None,
        prefill_config: prefill_kernels.PrefillConfig | None = None,
    ) -> None:
        self.pool, self._torch = pool, TorchBackend(pool)
        layout, k_LRKD = pool.layout, pool.k_LRKD
        sizes = (layout.head_dim, layout.v_head_dim)
        self._has_kernels = not layout.value_in_key and rotate_kernels.supports(
            k_LRKD.dtype, *sizes
        )
        self.pool_shape = plan_kernels.PoolShape(
            page_size=pool.page_size,
            num_page_rows=pool.num_page_rows,
            num_scratch_rows=pool.num_scratch_rows,
            num_kv_heads=layout.num_kv_heads,
            head_dim=max(sizes),
            dtype=k_LRKD.dtype,
        )
        self.num_processors, self.shared_bytes = _device_limits(k_LRKD.device)
        self.config, self.prefill_config = config, prefill_config
        self.workspace = tree_kernels.Workspace(k_LRKD.device)

    def page_rows(self, page_table_BP: Tensor, index_BQ: Tensor) -> Tensor:
        """Pool rows [B, Q] of cache indices [B, Q] (int64), through the page tables."""
        return self._torch.page_rows(page_table_BP, index_BQ)

    def scratch_rows(self, slots_B: Tensor, node_Q: Tensor) -> Tensor:
        """Pool rows [B, Q] of scratch nodes (int64 [Q]) of the slots."""
        return self._torch.scratch_rows(slots_B, node_Q)

    def plan_tree(
        self,
        *,
        page_table_BP: Tensor,
        slots_B: Tensor,
        first_index: int,
        end_index_B: Tensor,
        visible_BQN: Tensor,
        first_node: int,
        max_kv_len: int,
    ) -> Attention:
        """As TorchBackend.plan_tree; at most 64 scratch nodes. max_kv_len is not needed: an
        end_index past the page tables is cut to them."""
        if not self._has_kernels:
            return self._torch.plan_tree(
                page_table_BP=page_table_BP,
                slots_B=slots_B,
                first_index=first_index,
                end_index_B=end_index_B,
                visible_BQN=visible_BQN,
                first_node=first_node,
                max_kv_len=max_kv_len,
            )
        assert visible_BQN.shape[2] <= 64, "a row's nodes are the bits of one int64"
        inputs = plan_kernels.TreeInputs(
            page_table_BP=page_table_BP,
            slots_B=slots_B,
            first_index=first_index,
            end_index_B=end_index_B,
            visible_BQN=visible_BQN,
            first_node=first_node,
        )
        return _TreeAttention(self, inputs)

    def plan_prefill(
        self, *, page_table_BP: Tensor, chunks: Sequence[tuple[int, int]], device: torch.device
    ) -> Attention:
        """As TorchBackend.plan_prefill."""
        if not self._has_kernels:
            return self._torch.plan_prefill(
                page_table_BP=page_table_BP, chunks=chunks, device=device
            )
        return _PrefillAttention(self, page_table_BP, chunks, device)

    def plan_write(self, write_T: Tensor) -> TorchAttention | TritonAttention:
        """Only store keys and values at the given pool rows; nothing attends."""
        if not self._has_kernels:
            return self._torch.plan_write(write_T)
        return _WriteAttention(self, write_T)
