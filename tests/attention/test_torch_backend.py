"""The reference attention against dense attention made row by row, over poisoned pools."""

import dataclasses
import math

import pytest
import torch
from fixtures.tiny import fresh_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.attention.torch_backend import TorchAttention, TorchBackend
from eyas.cache.pool import NULL_PAGE, NUM_RESERVED_PAGES
from eyas.contract.attention import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=6, v_head_dim=4)
NUM_HEADS, LAYER, CPU = 6, 1, torch.device("cpu")
SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slow_attend(q_HD: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One row over the keys and values [K, D] that it may see, head by head."""
    out = []
    for head, q_D in enumerate(q_HD.double()):
        kv = head * LAYOUT.num_kv_heads // NUM_HEADS
        scores = [float(q_D @ key[kv].double()) / math.sqrt(LAYOUT.head_dim) for key in keys]
        weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
        out.append(sum(w * value[kv].double() for w, value in zip(weights, values, strict=True)))
    return torch.cat(out).float()


@dataclasses.dataclass
class Cache:
    """A backend with one written layer, and the same as lists by request and index."""

    backend: TorchBackend
    table_BP: Tensor
    keys: list[list[Tensor]]
    values: list[list[Tensor]]


def filled(lengths: list[int], *, page_size: int, num_pages: int, seed: int) -> Cache:
    """Requests with `lengths` entries in shuffled pages; all else is NaN."""
    backend = fresh_backend(
        LAYOUT,
        num_pages=num_pages * len(lengths),
        page_size=page_size,
        num_slots=len(lengths) + 1,
        num_scratch_rows=8,
    )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_pages * len(lengths), generator=generator) + NUM_RESERVED_PAGES
    cache = Cache(backend, order.view(len(lengths), num_pages), [], [])
    for request, length in enumerate(lengths):
        k_TKD, v_TKD = randn(length, 2, 6, seed=seed + request), randn(length, 2, 4, seed=-seed)
        rows = [
            int(cache.table_BP[request, i // page_size]) * page_size + i % page_size
            for i in range(length)
        ]
        backend.plan_write(torch.tensor(rows, dtype=torch.int64)).write(LAYER, k_TKD, v_TKD)
        cache.keys.append(list(k_TKD))
        cache.values.append(list(v_TKD))
    return cache


def run_plan(plan: TorchAttention, num_rows: int, seed: int) -> tuple[Tensor, ...]:
    """Write new rows and attend with random queries: (out [T, H * Dv], q, k, v)."""
    q, k = randn(num_rows, NUM_HEADS, 6, seed=seed), randn(num_rows, 2, 6, seed=seed + 1)
    v = randn(num_rows, 2, 4, seed=seed + 2)
    plan.write(LAYER, k, v)
    return plan.attend(LAYER, q), q, k, v


@SETTINGS
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    page_size=st.integers(1, 4),
    first_index=st.integers(0, 1),
    num_levels=st.integers(1, 3),
    slack=st.integers(0, 40),
    seed=st.integers(1, 99),
    data=st.data(),
)
def test_tree_rows_see_their_prefix_and_their_nodes(
    lengths: list[int],
    page_size: int,
    first_index: int,
    num_levels: int,
    slack: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Level by level, as a draft grows; masks at random; slots and pages in any order."""
    num_requests, width = len(lengths), 2
    cache = filled(lengths, page_size=page_size, num_pages=12 // page_size + 1, seed=seed)
    slots = data.draw(st.permutations(range(num_requests + 1)))[:num_requests]
    nodes: list[list[tuple[Tensor, Tensor]]] = [[] for _ in lengths]
    for level in range(num_levels):
        first_node = level * width
        shape = (num_requests, width, first_node + width)
        bits = data.draw(
            st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape))
        )
        visible = torch.tensor(bits).view(shape)
        own = torch.arange(width)
        visible[:, own, first_node + own] = True
        plan = cache.backend.plan_tree(
            page_table_BP=cache.table_BP,
            slots_B=torch.tensor(slots),
            first_index=first_index,
            end_index_B=torch.tensor(lengths),
            visible_BQN=visible,
            first_node=first_node,
            max_kv_len=max(lengths) + slack,
        )
        out, q, k, v = run_plan(plan, num_requests * width, seed + level)
        assert out.shape == (num_requests * width, NUM_HEADS * LAYOUT.v_head_dim)
        for row in range(num_requests * width):
            nodes[row // width].append((k[row], v[row]))
        for row in range(num_requests * width):
            request, seen = row // width, visible[row // width, row % width].tolist()
            tail = [node for node, sees in zip(nodes[request], seen, strict=True) if sees]
            keys = cache.keys[request][first_index:] + [key for key, _ in tail]
            values = cache.values[request][first_index:] + [value for _, value in tail]
            expected = slow_attend(q[row], keys, values)
            torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)


@SETTINGS
@given(
    spans=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6)), min_size=1, max_size=3),
    page_size=st.integers(1, 4),
    seed=st.integers(1, 99),
)
def test_prefill_chunks_are_causal(spans: list[tuple[int, int]], page_size: int, seed: int) -> None:
    starts = [start for start, _ in spans]
    cache = filled(starts, page_size=page_size, num_pages=14 // page_size + 1, seed=seed)
    chunks = [(start, start + count) for start, count in spans]
    plan = cache.backend.plan_prefill(page_table_BP=cache.table_BP, chunks=chunks, device=CPU)
    num_rows = sum(count for _, count in spans)
    out, q, k, v = run_plan(plan, num_rows, seed)
    row = 0
    for request, (start, end) in enumerate(chunks):
        for position in range(start, end):
            cache.keys[request].append(k[row])
            cache.values[request].append(v[row])
            assert len(cache.keys[request]) == position + 1
            expected = slow_attend(q[row], cache.keys[request], cache.values[request])
            torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)
            index = torch.tensor([[position]])
            pool_row = int(cache.backend.page_rows(cache.table_BP[request : request + 1], index))
            assert torch.equal(cache.backend.pool.k_LRKD[LAYER, pool_row], k[row])
            row += 1


def test_other_layers_stay_as_they_were() -> None:
    cache = filled([3], page_size=2, num_pages=3, seed=1)
    assert cache.backend.pool.k_LRKD[0, cache.backend.pool.page_size :].isnan().all()


def test_writes_alone() -> None:
    """`plan_write` stores rows wherever it is told, keys and values of their own widths."""
    backend = fresh_backend(LAYOUT, num_pages=2, page_size=4)
    k, v = randn(2, 2, 6), randn(2, 2, 4)
    backend.plan_write(torch.tensor([13, 9])).write(0, k, v)
    assert torch.equal(backend.pool.k_LRKD[0, [13, 9]], k)
    assert torch.equal(backend.pool.v_LRKD[0, [13, 9]], v)
    assert backend.pool.k_LRKD[0].isfinite().all(-1).all(-1).sum() == 4 + 2


def test_a_bound_past_the_page_table_is_cut() -> None:
    """The round may round lengths up past the table's end; it must not read beyond it."""
    cache = filled([5], page_size=2, num_pages=3, seed=2)
    outputs = []
    for bound in (5, 6, 64):
        plan = cache.backend.plan_tree(
            page_table_BP=cache.table_BP,
            slots_B=torch.tensor([1]),
            first_index=0,
            end_index_B=torch.tensor([5]),
            visible_BQN=torch.ones(1, 1, 1, dtype=torch.bool),
            first_node=0,
            max_kv_len=bound,
        )
        outputs.append(run_plan(plan, 1, 7)[0])
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])


def test_nodes_that_nobody_sees_need_not_be_written() -> None:
    """Nodes 0 and 1 hold NaN; a mask alone would let 0 * NaN through."""
    cache = filled([3], page_size=2, num_pages=2, seed=4)
    visible = torch.tensor([[[False, False, True, False], [False, False, True, True]]])
    plan = cache.backend.plan_tree(
        page_table_BP=cache.table_BP,
        slots_B=torch.tensor([0]),
        first_index=0,
        end_index_B=torch.tensor([3]),
        visible_BQN=visible,
        first_node=2,
        max_kv_len=3,
    )
    out, q, k, v = run_plan(plan, 2, 5)
    expected = slow_attend(q[1], [*cache.keys[0], *k], [*cache.values[0], *v])
    torch.testing.assert_close(out[1], expected, atol=1e-5, rtol=1e-5)


def test_a_slot_without_pages_sees_only_itself() -> None:
    """A padded row: its table is the null page; nothing of it is NaN and nothing is touched."""
    cache = filled([3], page_size=2, num_pages=2, seed=3)
    plan = cache.backend.plan_tree(
        page_table_BP=torch.full((2, 2), NULL_PAGE),
        slots_B=torch.tensor([1, 1]),  # padding repeats the trash slot
        first_index=0,
        end_index_B=torch.tensor([0, 0]),
        visible_BQN=torch.ones(2, 1, 1, dtype=torch.bool),
        first_node=0,
        max_kv_len=64,
    )
    before = cache.backend.pool.k_LRKD[:, : cache.backend.pool.num_page_rows].clone()
    out, _, _, _ = run_plan(plan, 2, 5)
    assert out.isfinite().all()
    after = cache.backend.pool.k_LRKD[:, : cache.backend.pool.num_page_rows]
    assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


@pytest.mark.parametrize("page_size", [1, 3])
def test_rows_of_pages_and_scratch_never_meet(page_size: int) -> None:
    backend = fresh_backend(
        LAYOUT, num_pages=4, page_size=page_size, num_slots=3, num_scratch_rows=5
    )
    index = torch.arange(4 * page_size).expand(1, -1)
    pages = backend.page_rows(torch.arange(4)[None] + NUM_RESERVED_PAGES, index)
    scratch = backend.scratch_rows(torch.arange(3), torch.arange(5))
    rows = torch.cat((pages.flatten(), scratch.flatten())).tolist()
    assert sorted(rows) == list(range(NUM_RESERVED_PAGES * page_size, len(rows) + 2 * page_size))
    assert backend.pool.k_LRKD.shape[1] == rows[-1] + 1
