# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Triton: the work list and the masks of a forward's attention, written by one launch (D8).

A request's columns are its prefix, then its scratch nodes. They are cut into items of about equal
length; how many items there are depends on the batch alone, so that one captured graph serves any
lengths, which are read from device memory.

Shape suffixes: B requests, Q rows a request, N scratch nodes, I items, F fields, P pages.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

ITEM_FIELDS = 8  # request, begin, end, first item, splits, prefix, scratch row, nodes seen (bits)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _cut(blocks_B, wanted, min_blocks, slots):
    """(blocks an item for `wanted` of them at most, an estimate of the time in blocks): the longest
    item, and before it the others, where not all run at once."""
    total = tl.sum(blocks_B, 0)
    chunk = tl.maximum((total + wanted - 1) // wanted, min_blocks)
    splits_B = (blocks_B + chunk - 1) // chunk
    longest = tl.max((blocks_B + splits_B - 1) // tl.maximum(splits_B, 1), 0)
    wait = tl.where(tl.sum(splits_B, 0) > slots, total // slots, 0)
    return chunk, longest + wait


@triton.jit(
    do_not_specialize=[
        "first_index", "most_index", "num_requests", "num_rows", "num_nodes", "num_items", "slots",
        "first_node", "first_scratch_row", "num_scratch_rows", "min_blocks",
    ]
)  # fmt: skip
def _plan_tree_kernel(
    end_ptr, slots_ptr, visible_ptr, items_ptr, bits_ptr, write_ptr, spans_ptr, visible_stride_b,
    visible_stride_q, visible_stride_n, first_index, most_index, num_requests, num_rows, num_nodes,
    num_items, slots, first_node, first_scratch_row, num_scratch_rows, min_blocks,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """One program a request; each counts all requests' blocks anew, which costs one load."""
    request = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    end_B = tl.load(end_ptr + b, mask=b < num_requests, other=0)
    prefix_B = tl.maximum(tl.minimum(end_B, most_index) - first_index, 0)
    blocks_B = (prefix_B + num_nodes + BLOCK_N - 1) // BLOCK_N
    blocks_B = tl.where(b < num_requests, blocks_B, 0)
    # sum(ceil(blocks / chunk)) < total / chunk + num_requests: no item too many in either way, and
    # in the second all run at once.
    chunk, cost = _cut(blocks_B, slots, min_blocks, slots)
    other, other_cost = _cut(blocks_B, tl.maximum(slots - num_requests + 1, 1), min_blocks, slots)
    chunk = tl.where(other_cost <= cost, other, chunk)
    splits_B = (blocks_B + chunk - 1) // chunk
    each_B = (blocks_B + splits_B - 1) // tl.maximum(splits_B, 1)  # even: the last is not a stub
    mine_B = b == request
    each = tl.sum(tl.where(mine_B, each_B, 0), 0)
    # Long items first: short ones then fill what is left at the end.
    before_B = (each_B > each) | ((each_B == each) & (b < request))
    first_item = tl.sum(tl.where(before_B, splits_B, 0), 0)
    num_used = tl.sum(splits_B, 0)
    splits = tl.sum(tl.where(mine_B, splits_B, 0), 0)
    blocks = tl.sum(tl.where(mine_B, blocks_B, 0), 0)
    prefix = tl.sum(tl.where(mine_B, prefix_B, 0), 0)
    slot = tl.load(slots_ptr + request)
    scratch_row = first_scratch_row + slot * num_scratch_rows

    q = tl.arange(0, BLOCK_Q)
    n = tl.arange(0, 64)
    place = request.to(tl.int64) * visible_stride_b + (q * visible_stride_q)[:, None]
    visible_QN = tl.load(
        visible_ptr + place + (n * visible_stride_n)[None, :],
        mask=(q < num_rows)[:, None] & (n < num_nodes)[None, :],
        other=0,
    )
    bits_Q = tl.sum((visible_QN != 0).to(tl.int64) << n[None, :].to(tl.int64), 1)
    seen = tl.reduce(bits_Q, 0, _or)
    row = request * num_rows + q
    tl.store(bits_ptr + row, bits_Q, mask=q < num_rows)
    tl.store(write_ptr + row, scratch_row + first_node + q, mask=q < num_rows)

    tl.store(spans_ptr + request * 2, first_item.to(tl.int64))
    tl.store(spans_ptr + request * 2 + 1, splits.to(tl.int64))
    for start in range(0, splits, BLOCK_I):
        split = start + tl.arange(0, BLOCK_I)
        ok = split < splits
        item_ptr = items_ptr + (first_item + split) * 8
        begin = tl.minimum(split * each, blocks) * BLOCK_N
        end = tl.minimum(begin + each * BLOCK_N, prefix + num_nodes)
        tl.store(item_ptr, tl.zeros_like(begin) + request, mask=ok)
        tl.store(item_ptr + 1, begin, mask=ok)
        tl.store(item_ptr + 2, end, mask=ok)
        tl.store(item_ptr + 3, tl.zeros_like(begin) + first_item, mask=ok)
        tl.store(item_ptr + 4, tl.zeros_like(begin) + splits, mask=ok)
        tl.store(item_ptr + 5, tl.zeros_like(begin) + prefix, mask=ok)
        tl.store(item_ptr + 6, tl.zeros_like(begin) + scratch_row, mask=ok)
        tl.store(item_ptr + 7, tl.zeros_like(begin) + seen, mask=ok)
    if request == num_requests - 1:  # what is left of the list has no work
        for start in range(num_used, num_items, BLOCK_I):
            item = start + tl.arange(0, BLOCK_I)
            tl.store(items_ptr + item * 8 + 4, tl.zeros_like(item).to(tl.int64), item < num_items)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """How the work is cut, and by what it is put together.

    block_n: columns a step. waves: programs that a multiprocessor runs at once; about so many are
    made. min_blocks: steps below which an item is not cut. combine: partial results are added by
    the last program of a request, or by a launch apart. prefetch: the first step's keys and values
    are sent for before the queries.
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    waves: int = 2
    min_blocks: int = 1
    combine: Literal["last", "apart"] = "last"
    prefetch: bool = True


@dataclasses.dataclass(frozen=True)
class Load:
    """What a forward asks of the device. num_pairs: (row, query head) pairs of one key/value head;
    num_programs: programs where no request is cut; num_processors, shared_bytes: the device's
    multiprocessors, and what one program may have of shared memory."""

    num_pairs: int
    num_programs: int
    num_processors: int
    shared_bytes: int


def choose_tree_config(dtype: torch.dtype, head_dim: int, load: Load) -> TreeConfig:
    """Settings by how busy the device is without cutting, as timed on one H200 at 768 tokens
    (docs/benchmarks.md).

    Few programs: requests are cut, and adding up is a launch of its own, as one program would take
    long over it. Many: nothing is cut unless one request is much longer, and small steps leave room
    for several programs on a multiprocessor.
    """
    if dtype.itemsize == 4:
        return TreeConfig(block_n=32, num_stages=1)
    has_many_rows = load.num_pairs >= 64
    is_narrow = head_dim <= 64
    share = load.num_programs / load.num_processors
    if share <= (1 / 4 if has_many_rows else 1 / 2):
        config = TreeConfig(combine="apart")
        if share <= 1 / 8:
            config = TreeConfig(combine="apart", waves=1)
            if load.num_pairs > 8 and not has_many_rows and not is_narrow:
                config = TreeConfig(combine="apart", block_n=128, num_stages=2)
        elif is_narrow:
            config = TreeConfig(combine="apart", num_warps=2)
    elif has_many_rows:
        config = TreeConfig(waves=1)
    elif share < 2:
        config = TreeConfig(num_stages=4, waves=1 if load.num_pairs > 8 and share <= 1 else 2)
        if is_narrow:
            config = TreeConfig(num_warps=2)
    elif load.num_pairs > 8:
        config = TreeConfig(block_n=32, num_warps=2, num_stages=4)
    else:
        config = TreeConfig(block_n=64 if is_narrow else 32)
    return _fitting(config, 2 * triton.next_power_of_2(head_dim) * dtype.itemsize, load)


def _fitting(config: TreeConfig, column_bytes: int, load: Load) -> TreeConfig:
    """The same, with as few columns under way as shared memory holds."""
    room = load.shared_bytes - 48 * 1024  # queries and weights on their way to the matrix units
    block_n, num_stages = config.block_n, config.num_stages
    while num_stages > 1 and (num_stages - 1) * block_n * column_bytes > room:
        if block_n > 32:
            block_n //= 2
        else:
            num_stages -= 1
    return dataclasses.replace(config, block_n=block_n, num_stages=num_stages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeWork:
    """One forward's plan on the device, shared by its layers.

    items_IF: int64 [I, ITEM_FIELDS]. spans_B2: int64, first item and splits of each request.
    bits_BQ: int64, the nodes that each row sees. write_T: int64
    pool rows of the new rows. num_m: blocks of (row, query head) pairs of one key/value head.
    """

    items_IF: Tensor
    spans_B2: Tensor
    bits_BQ: Tensor
    write_T: Tensor
    page_table_BP: Tensor
    first_index: int
    first_node: int
    page_size: int
    num_groups: int
    block_m: int
    config: TreeConfig

    @property
    def num_m(self) -> int:
        """Programs along the (row, query head) pairs."""
        return triton.cdiv(self.bits_BQ.shape[1] * self.num_groups, self.block_m)


def choose_block_m(num_pairs: int, dtype: torch.dtype, head_dim: int) -> int:
    """Pairs a program: as few as the matrix units take, at most what registers hold."""
    most = 64 if dtype.itemsize == 2 and head_dim <= 128 else 16 if dtype.itemsize == 4 else 32
    return max(16, min(most, triton.next_power_of_2(num_pairs)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeInputs:
    """What a forward attends to, as the backend is told: see TorchBackend.plan_tree."""

    page_table_BP: Tensor
    slots_B: Tensor
    first_index: int
    end_index_B: Tensor
    visible_BQN: Tensor
    first_node: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolShape:
    """Where the rows of a pool lie, and what they hold (K heads of D elements)."""

    page_size: int
    num_page_rows: int
    num_scratch_rows: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


def plan_tree(
    inputs: TreeInputs,
    pool: PoolShape,
    *,
    num_groups: int,
    num_processors: int,
    shared_bytes: int,
    config: TreeConfig | None = None,
) -> TreeWork:
    """Write the work list, the masks and the rows to write: one launch, nothing read back.

    num_groups: query heads of a key/value head. num_processors, shared_bytes: see Load. config:
    None chooses by these.
    """
    table_BP, slots_B, visible_BQN = inputs.page_table_BP, inputs.slots_B, inputs.visible_BQN
    num_requests, num_rows, _ = visible_BQN.shape
    table_BP = table_BP if table_BP.stride(1) == 1 else table_BP.contiguous()
    block_m = choose_block_m(num_rows * num_groups, pool.dtype, pool.head_dim)
    per_item = pool.num_kv_heads * triton.cdiv(num_rows * num_groups, block_m)
    if config is None:
        num_pairs, num_programs = num_rows * num_groups, num_requests * per_item
        load = Load(num_pairs, num_programs, num_processors, shared_bytes)
        config = choose_tree_config(pool.dtype, pool.head_dim, load)
    slots = max(1, config.waves * num_processors // per_item)
    work = TreeWork(
        items_IF=slots_B.new_empty(num_requests + slots - 1, ITEM_FIELDS, dtype=torch.int64),
        spans_B2=slots_B.new_empty(num_requests, 2, dtype=torch.int64),
        bits_BQ=slots_B.new_empty(num_requests, num_rows, dtype=torch.int64),
        write_T=slots_B.new_empty(num_requests * num_rows, dtype=torch.int64),
        page_table_BP=table_BP,
        first_index=inputs.first_index,
        first_node=inputs.first_node,
        page_size=pool.page_size,
        num_groups=num_groups,
        block_m=block_m,
        config=config,
    )
    outputs = (work.items_IF, work.bits_BQ, work.write_T, work.spans_B2)
    _plan_tree_kernel[(num_requests,)](
        inputs.end_index_B.contiguous(),
        slots_B.contiguous(),
        visible_BQN.view(torch.int8),
        *outputs,
        *visible_BQN.stride(),
        inputs.first_index,
        table_BP.shape[1] * pool.page_size,
        *visible_BQN.shape,
        len(work.items_IF),
        slots,
        inputs.first_node,
        *(pool.num_page_rows, pool.num_scratch_rows),
        config.min_blocks,
        BLOCK_N=config.block_n,
        BLOCK_B=triton.next_power_of_2(num_requests),
        BLOCK_Q=triton.next_power_of_2(num_rows),
        BLOCK_I=64,
        num_warps=4,
    )
    return work
