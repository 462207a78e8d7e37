"""Reference attention over the paged cache, in torch operations only, on any device (D8).

A plan is made once per forward and shared by all layers. Every plan comes down to rows: the rows
of the pool that the batch writes, and for each request the rows that it reads with an additive
mask. Lengths and page tables are read from device memory; the only host number is an upper bound
of the lengths, which fixes the shapes.

Shape suffixes: B requests, Q query rows a request, T = B * Q rows, S rows read, N scratch rows
read, P pages a request, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas import kernels
from eyas.cache.pool import KVPool
from eyas.contract.attention import HeadNorms
from eyas.kernels import FewRowsAttention, TreeRows


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rows [start, start + B * Q) of the batch and what they read.

    read_T: int64 pool rows [B * S]; masked entries point to the null row. bias_BQS: 0 or -inf.
    """

    start: int
    read_T: Tensor
    bias_BQS: Tensor


class TorchAttention:
    """Implements contract.attention.Attention for one planned forward.

    segments: or a function that finds them, called if they are needed. tree: the same in a form
    that some kernels take, for a plan of one segment.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        write_T: Tensor,
        segments: Sequence[Segment] | Callable[[], Sequence[Segment]],
        tree: TreeRows | None = None,
    ) -> None:
        self._pool, self._write_T, self._found, self._tree = pool, write_T, segments, tree
        self._grouped_bias: dict[int, list[Tensor]] = {}
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._writer: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self._few_rows: list[tuple[int, FewRowsAttention]] | None = None

    @property
    def _segments(self) -> Sequence[Segment]:
        if callable(self._found):
            self._found = self._found()
        return self._found

    def rotate_and_write(
        self,
        layer: int,
        qkv_TE: Tensor,
        rotary: tuple[Tensor, Tensor],
        *,
        num_heads: int,
        norms: HeadNorms | None = None,
    ) -> Tensor | None:
        """contract.attention.RotatingAttention, where a kernel does it in one go."""
        if norms is not None:
            return None
        cache = self._pool.layers[layer]
        if self._rotary is not rotary:  # the same object for all layers
            self._rotary = rotary
            self._writer = kernels.plan_rope_write(
                qkv_TE, rotary, self._write_T, cache, num_heads=num_heads
            )
        return None if self._writer is None else self._writer(qkv_TE, *cache)

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store keys and values of the batch's rows."""
        k_RKD, v_RKD = self._pool.layers[layer]
        k_RKD.index_copy_(0, self._write_T, k_TKD)
        if self._pool.layout.v_head_dim:  # else the value is part of the key
            v_RKD.index_copy_(0, self._write_T, v_TKD)

    def attend(self, layer: int, q_THD: Tensor, *, scale: float | None = None) -> Tensor:
        """[T, H, D] -> [T, H * Dv]."""
        if self._pool.layout.value_in_key:
            parts = [self._attend_latent(layer, q_THD, s, scale) for s in self._segments]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if scale is not None:
            return self._attend_by_gathering(layer, q_THD, scale)
        if self._few_rows is None:
            self._few_rows = self._plan_few_rows(q_THD, self._pool.layers[layer])
        k_RKD, v_RKD = self._pool.layers[layer]
        if not self._few_rows:
            return self._attend_by_gathering(layer, q_THD)
        num_tokens, num_heads, _ = q_THD.shape
        out_TE = q_THD.new_empty(num_tokens, num_heads * v_RKD.shape[2])
        for start, attend in self._few_rows:
            if start:
                attend(q_THD[start:], k_RKD, v_RKD, out_TE[start:])
            else:
                attend(q_THD, k_RKD, v_RKD, out_TE)
        return out_TE

    def few_rows(self, layer: int, q_THD: Tensor) -> tuple[int, Tensor, Tensor, Tensor] | None:
        """(address of a C plan, rows to write, keys, values) for kernels that do a layer at once,
        or None; q_THD: queries by example."""
        cache = self._pool.layers[layer]
        if self._few_rows is None:
            self._few_rows = self._plan_few_rows(q_THD, cache)
        if len(self._few_rows) != 1:
            return None
        _, plan = self._few_rows[0]
        return plan.address, self._write_T, *cache

    def written_rows(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """(rows to write, keys, values)."""
        return self._write_T, *self._pool.layers[layer]

    def _plan_few_rows(
        self, q_THD: Tensor, cache: tuple[Tensor, Tensor]
    ) -> list[tuple[int, FewRowsAttention]]:
        """(first row, attention of few rows) by segment; empty where one is left to torch."""
        if self._tree is not None:
            plan = kernels.plan_attention(q_THD, self._tree, cache)
            return [] if plan is None else [(0, plan)]
        plans: list[tuple[int, FewRowsAttention]] = []
        for segment in self._segments:
            plan = kernels.plan_attention(q_THD, (segment.read_T, segment.bias_BQS), cache)
            if plan is None:
                return []
            plans.append((segment.start, plan))
        return plans

    def _attend_by_gathering(self, layer: int, q_THD: Tensor, scale: float | None = None) -> Tensor:
        num_groups = q_THD.shape[1] // self._pool.layout.num_kv_heads
        if num_groups not in self._grouped_bias:  # made once, used by every layer
            self._grouped_bias[num_groups] = [
                s.bias_BQS.repeat(1, num_groups, 1)[:, None] for s in self._segments
            ]
        biases = self._grouped_bias[num_groups]
        parts = [
            self._attend_segment(layer, q_THD, segment, bias, scale)
            for segment, bias in zip(self._segments, biases, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_segment(
        self,
        layer: int,
        q_THD: Tensor,
        segment: Segment,
        bias_B1GQS: Tensor,
        scale: float | None,
    ) -> Tensor:
        num_requests, num_queries, num_read = segment.bias_BQS.shape
        num_kv_heads = self._pool.layout.num_kv_heads
        num_rows = num_requests * num_queries
        q = q_THD[segment.start : segment.start + num_rows] if len(q_THD) > num_rows else q_THD
        # The query heads of one key/value head become extra query rows: nothing is repeated.
        if num_queries == 1:
            q = q.reshape(num_requests, num_kv_heads, -1, q.shape[-1])
        else:
            q = q.reshape(num_requests, num_queries, num_kv_heads, -1, q.shape[-1])
            q = q.permute(0, 2, 3, 1, 4).reshape(num_requests, num_kv_heads, -1, q.shape[-1])
        k, v = (
            cache_RKD.index_select(0, segment.read_T)
            .view(num_requests, num_read, num_kv_heads, -1)
            .transpose(1, 2)
            for cache_RKD in self._pool.layers[layer]
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_B1GQS, scale=scale)
        if num_queries > 1:
            out = out.view(num_requests, num_kv_heads, -1, num_queries, out.shape[-1])
            out = out.permute(0, 3, 1, 2, 4)
        return out.reshape(num_rows, -1)

    def _attend_latent(
        self, layer: int, q_THD: Tensor, segment: Segment, scale: float | None
    ) -> Tensor:
        """Heads that share one key, whose first part is the value: gathered once, expanded without
        a copy. The whole key stands in for the value, as equal sizes are what the fused kernels
        take, and what is too much of the result is cut."""
        num_requests, num_queries, num_read = segment.bias_BQS.shape
        num_rows, (_, num_heads, size) = num_requests * num_queries, q_THD.shape
        q = q_THD[segment.start : segment.start + num_rows]
        if num_queries == 1:  # heads as rows: one product
            q = q.reshape(num_requests, 1, num_heads, size)
        else:
            q = q.reshape(num_requests, num_queries, num_heads, size).transpose(1, 2)
        k_RKD, _ = self._pool.layers[layer]
        k = k_RKD.index_select(0, segment.read_T).view(num_requests, 1, num_read, size)
        k = k.expand(-1, q.shape[1], -1, -1)
        bias = segment.bias_BQS[:, None]
        out = F.scaled_dot_product_attention(q, k, k, attn_mask=bias, scale=scale)
        if num_queries > 1:
            out = out.transpose(1, 2)
        return out[..., : self._pool.layout.value_in_key].reshape(num_rows, -1)


class TorchBackend:
    """Plans attention over one pool."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def page_rows(self, page_table_BP: Tensor, index_BQ: Tensor) -> Tensor:
        """Pool rows [B, Q] of cache indices [B, Q] (int64), through the page tables."""
        size = self.pool.page_size
        page_BQ = page_table_BP.gather(1, index_BQ // size)
        return page_BQ * size + index_BQ % size

    def scratch_rows(self, slots_B: Tensor, node_Q: Tensor) -> Tensor:
        """Pool rows [B, Q] of scratch nodes (int64 [Q]) of the slots."""
        first_B = self.pool.num_page_rows + slots_B * self.pool.num_scratch_rows
        return first_B[:, None] + node_Q[None, :]

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
    ) -> TorchAttention:
        """Q rows a request over pages [first_index, end_index) and the scratch tail.

        The rows are written to scratch nodes first_node .. first_node + Q - 1; of the scratch
        nodes 0 .. N - 1 each row sees those that visible_BQN (bool) names, itself among them.
        max_kv_len: no end_index is above it; a bound past the page tables is cut to them.
        """
        pool = self.pool
        max_kv_len = min(max_kv_len, page_table_BP.shape[1] * pool.page_size)
        last_index = max(max_kv_len, first_index)

        def segments() -> list[Segment]:
            return self._tree_segments(
                page_table_BP,
                slots_B,
                end_index_B,
                visible_BQN,
                index_S=torch.arange(first_index, last_index, device=slots_B.device),
            )

        tree = kernels.plan_tree_rows(
            page_table_BP,
            slots_B,
            end_index_B,
            visible_BQN,
            first_index=first_index,
            last_index=last_index,
            first_node=first_node,
            page_size=pool.page_size,
            scratch=(pool.num_page_rows, pool.num_scratch_rows),
        )
        if tree is not None:
            return TorchAttention(pool, write_T=tree.write_T, segments=segments, tree=tree)
        node_Q = torch.arange(first_node, first_node + visible_BQN.shape[1], device=slots_B.device)
        write_BQ = self.scratch_rows(slots_B, node_Q)
        return TorchAttention(pool, write_T=write_BQ.reshape(-1), segments=segments)

    def _tree_segments(
        self,
        page_table_BP: Tensor,
        slots_B: Tensor,
        end_index_B: Tensor,
        visible_BQN: Tensor,
        *,
        index_S: Tensor,
    ) -> list[Segment]:
        """The one segment of trees whose prefixes lie among the indices index_S."""
        num_requests, num_queries, num_nodes = visible_BQN.shape
        node_N = torch.arange(num_nodes, device=slots_B.device)
        tail_BN = self.scratch_rows(slots_B, node_N)
        in_prefix_BS = index_S[None, :] < end_index_B[:, None]
        prefix_BS = self.page_rows(page_table_BP, index_S.expand(num_requests, -1))
        prefix_BS = torch.where(in_prefix_BS, prefix_BS, 0)
        # A node that no row of this request sees may never have been written.
        tail_seen_BN = visible_BQN.any(1)
        read_BS = torch.cat((prefix_BS, torch.where(tail_seen_BN, tail_BN, 0)), dim=1)
        prefix_BQS = in_prefix_BS[:, None, :].expand(-1, num_queries, -1)
        allowed_BQS = torch.cat((prefix_BQS, visible_BQN), dim=2)
        return [Segment(0, read_BS.view(-1), self._bias(allowed_BQS))]

    def plan_prefill(
        self, *, page_table_BP: Tensor, chunks: Sequence[tuple[int, int]], device: torch.device
    ) -> TorchAttention:
        """Causal attention of prompt chunks: request b's rows are positions start..end - 1.

        chunks: (start, end) by request, host numbers; the rows follow one another in the batch.
        """
        writes, segments, row = [], [], 0
        for request, (start, end) in enumerate(chunks):
            table_1P = page_table_BP[request : request + 1]
            index_S = torch.arange(end, device=device)
            read_1S = self.page_rows(table_1P, index_S[None])
            allowed_1QS = index_S[None, None, :] <= index_S[None, start:, None]
            segments.append(Segment(row, read_1S[0], self._bias(allowed_1QS)))
            writes.append(read_1S[0, start:])
            row += end - start
        return TorchAttention(self.pool, write_T=torch.cat(writes), segments=segments)

    def plan_write(self, write_T: Tensor) -> TorchAttention:
        """Only store keys and values at the given pool rows; nothing attends."""
        return TorchAttention(self.pool, write_T=write_T, segments=[])

    def _bias(self, allowed: Tensor) -> Tensor:
        dtype = self.pool.k_LRKD.dtype
        bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return bias.masked_fill_(~allowed, float("-inf"))
