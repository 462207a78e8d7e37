"""Attention by Triton kernels, in the interpreter, against torch's over poisoned pools."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas import kernels
from eyas.attention.torch_backend import TorchBackend
from eyas.cache.pool import NULL_PAGE, NUM_RESERVED_PAGES, KVPool
from eyas.contract.attention import HeadNorms, KVLayout

pytestmark = pytest.mark.interpreter

GQA = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, v_head_dim=16)
ODD = KVLayout(num_layers=2, num_kv_heads=3, head_dim=24, v_head_dim=12)
LAYER, CPU = 1, torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two faults of the interpreter of Triton 3.6. It holds scalars as arrays of one element, of
    which NumPy 2.4 makes no int any more: no loop could run up to a number that a kernel has read.
    And its products of bfloat16 multiply the bits as integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_more(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def wide_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype == tl.bfloat16:
            a, b = (builder.cast_impl(x, tl.float32) for x in (a, b))
        return dot(builder, a, b, *others)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_more)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", wide_dot)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Pair:
    """The same pool twice, one for each backend, and the page tables of its requests."""

    reference: TorchBackend
    triton: Any
    table_BP: Tensor

    @property
    def pools(self) -> tuple[KVPool, KVPool]:
        return self.reference.pool, self.triton.pool

    def assert_same_pools(self) -> None:
        for kind in ("k_LRKD", "v_LRKD"):
            expected, actual = (getattr(pool, kind) for pool in self.pools)
            torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-2, equal_nan=True)


def make_pair(
    lengths: list[int],
    *,
    layout: KVLayout = GQA,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    num_slots: int = 4,
    **options: Any,
) -> Pair:
    """Requests with `lengths` written entries in shuffled pages; all else is NaN."""
    from eyas.attention.triton_backend import TritonBackend

    pages_each = -(-(max(lengths) + 72) // page_size)
    num_pages = pages_each * len(lengths)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    table_BP = (order + NUM_RESERVED_PAGES).view(len(lengths), pages_each)
    pools = [
        KVPool(
            layout,
            num_pages=num_pages + NUM_RESERVED_PAGES,
            page_size=page_size,
            num_slots=max(num_slots, len(lengths) + 1),
            num_scratch_rows=64,
            dtype=dtype,
            device="cpu",
        )
        for _ in range(2)
    ]
    for pool in pools:
        pool.poison()
        for request, length in enumerate(lengths):
            index = torch.arange(length)
            rows = table_BP[request, index // page_size] * page_size + index % page_size
            for kind, tensor in enumerate((pool.k_LRKD[LAYER], pool.v_LRKD[LAYER])):
                values = randn(length, *tensor.shape[1:], seed=seed + 10 * request + kind)
                tensor[rows] = values.to(dtype)
    return Pair(TorchBackend(pools[0]), TritonBackend(pools[1], **options), table_BP)


def random_tree(num_requests: int, num_rows: int, first_node: int, *, seed: int) -> Tensor:
    """Random masks over the nodes before, each row seeing itself."""
    shape = (num_requests, num_rows, first_node + num_rows)
    visible = randn(*shape, seed=seed) > 0
    own = torch.arange(num_rows)
    visible[:, own, first_node + own] = True
    return visible


def chain(num_requests: int, num_rows: int) -> Tensor:
    visible = torch.ones(num_rows, num_rows, dtype=torch.bool).tril_()
    return visible.expand(num_requests, -1, -1)


def written_tail(pair: Pair, slots: list[int], first_node: int, *, seed: int) -> None:
    """Scratch nodes before first_node, as earlier levels of a draft left them."""
    for pool in pair.pools:
        rows = pair.reference.scratch_rows(torch.tensor(slots), torch.arange(first_node)).flatten()
        for kind, tensor in enumerate((pool.k_LRKD[LAYER], pool.v_LRKD[LAYER])):
            tensor[rows] = randn(len(rows), *tensor.shape[1:], seed=seed + kind).to(tensor.dtype)


def check(pair: Pair, plans: list[Any], num_rows: int, num_heads: int, *, seed: int = 5) -> Tensor:
    """Write and attend through both plans; outputs and pools agree. Returns the Triton output."""
    layout, dtype = pair.reference.pool.layout, pair.reference.pool.k_LRKD.dtype
    q = randn(num_rows, num_heads, layout.head_dim, seed=seed).to(dtype)
    k = randn(num_rows, layout.num_kv_heads, layout.head_dim, seed=seed + 1).to(dtype)
    v = randn(num_rows, layout.num_kv_heads, layout.v_head_dim, seed=seed + 2).to(dtype)
    for plan in plans:
        plan.write(LAYER, k, v)
    expected, actual = (plan.attend(LAYER, q) for plan in plans)
    assert actual.dtype == dtype and actual.shape == (num_rows, num_heads * layout.v_head_dim)
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, atol=limit, rtol=limit)
    pair.assert_same_pools()
    return actual


def tree_plans(pair: Pair, lengths: list[int], visible_BQN: Tensor, **changes: Any) -> list[Any]:
    arguments: dict[str, Any] = {
        "page_table_BP": pair.table_BP,
        "slots_B": torch.arange(len(lengths)),
        "first_index": 0,
        "end_index_B": torch.tensor(lengths),
        "visible_BQN": visible_BQN,
        "first_node": 0,
        "max_kv_len": max(lengths) + 7,
    }
    arguments |= changes
    return [backend.plan_tree(**arguments) for backend in (pair.reference, pair.triton)]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("first_index", [0, 1])
def test_a_chain_over_pages(page_size: int, first_index: int) -> None:
    lengths = [70, 1, 33]
    pair = make_pair(lengths, page_size=page_size)
    slots_B = torch.tensor([2, 0, 3])
    plans = tree_plans(pair, lengths, chain(3, 4), slots_B=slots_B, first_index=first_index)
    check(pair, plans, 12, 8)


@pytest.mark.parametrize("num_rows", [1, 5, 64])
@pytest.mark.parametrize("num_heads", [2, 14])
def test_trees(num_rows: int, num_heads: int) -> None:
    """More pairs of row and head than one program takes, heads in groups of 7 and of 1."""
    lengths = [40, 9]
    pair = make_pair(lengths)
    plans = tree_plans(pair, lengths, random_tree(2, num_rows, 0, seed=3))
    check(pair, plans, 2 * num_rows, num_heads)


@pytest.mark.parametrize("layout", [ODD, KVLayout(2, 1, 64, 64), KVLayout(2, 1, 80, 128)], ids=str)
def test_head_sizes(layout: KVLayout) -> None:
    lengths = [50, 3]
    pair = make_pair(lengths, layout=layout)
    plans = tree_plans(pair, lengths, chain(2, 2))
    check(pair, plans, 4, layout.num_kv_heads * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    lengths = [130, 20]
    pair = make_pair(lengths, dtype=dtype)
    check(pair, tree_plans(pair, lengths, chain(2, 3)), 6, 4)


def test_a_level_of_a_draft() -> None:
    """Nodes that no row sees hold NaN; those before the new ones were written earlier."""
    lengths = [37, 5]
    pair = make_pair(lengths)
    written_tail(pair, [0, 1], 6, seed=9)
    for pool in pair.pools:  # node 2 is seen by nobody
        rows = pair.reference.scratch_rows(torch.tensor([0, 1]), torch.tensor([2])).flatten()
        pool.k_LRKD[:, rows] = float("nan")
        pool.v_LRKD[:, rows] = float("nan")
    visible = random_tree(2, 3, 6, seed=4)
    visible[:, :, 2] = False
    plans = tree_plans(pair, lengths, visible, first_node=6, first_index=1)
    check(pair, plans, 6, 4)


@pytest.mark.parametrize("combine", ["last", "apart"])
@pytest.mark.parametrize("min_blocks", [1, 2, 50])
def test_long_and_short_requests(min_blocks: int, combine: Any) -> None:
    """A request in many splits beside ones in a single split, twice over the same counters; the
    longest items come first."""
    from eyas.kernels.triton_attention_plan import TreeConfig

    lengths = [3, 900, 0, 17, 64]
    config = TreeConfig(block_n=16, min_blocks=min_blocks, waves=20, combine=combine)
    pair = make_pair(lengths, config=config)
    for seed in (1, 2):
        plans = tree_plans(pair, lengths, chain(5, 2))
        check(pair, plans, 10, 4, seed=seed)
    splits = plans[1]._work.items_IF[:, 4]
    assert int(splits.max()) == {1: 29, 2: 29, 50: 2}[min_blocks]
    assert not pair.triton.workspace.take(0, 1, 0)[2].any()
    used = plans[1]._work.items_IF[splits > 0]
    firsts = used[used[:, 1] == 0]  # a request's first item is as long as any of it
    assert len(firsts) == 5 and ((firsts[:, 2] - 1) // 16).diff().le(0).all()


@pytest.mark.parametrize("num_requests", [1, 3, 4, 7])
def test_alike_requests_are_cut_into_no_more_items_than_run_at_once(num_requests: int) -> None:
    from eyas.kernels.triton_attention_plan import TreeConfig

    lengths = [170] * num_requests
    pair = make_pair(lengths, config=TreeConfig(block_n=16, waves=4), num_slots=8)
    plans = tree_plans(pair, lengths, chain(num_requests, 2))
    check(pair, plans, 2 * num_requests, 4)
    slots, splits = 8, plans[1]._work.items_IF[:, 4]
    assert len(splits) == slots + num_requests - 1
    assert int((splits > 0).sum()) <= slots
    assert int((splits > 0).sum()) == {1: 6, 3: 6, 4: 8, 7: 7}[num_requests]


def test_padding_with_the_trash_slot() -> None:
    """Slots without pages, one with a length past its page table: finite, and nothing touched."""
    lengths = [20, 0, 10**9]
    pair = make_pair([20], num_slots=3)
    table_BP = torch.full((3, pair.table_BP.shape[1]), NULL_PAGE)
    table_BP[0] = pair.table_BP[0]
    slots_B = torch.tensor([0, 2, 2])
    plans = tree_plans(
        pair, lengths, chain(3, 1), slots_B=slots_B, page_table_BP=table_BP, max_kv_len=10**4
    )
    assert check(pair, plans, 3, 4).isfinite().all()


def test_a_request_that_sees_nothing_gives_zeros() -> None:
    pair = make_pair([0])
    plan = tree_plans(pair, [0], torch.zeros(1, 2, 2, dtype=torch.bool))[1]
    assert plan.attend(LAYER, torch.ones(2, 4, 16)).eq(0).all()


def test_the_scale_of_the_scores() -> None:
    pair = make_pair([12])
    plans = tree_plans(pair, [12], chain(1, 1))
    k, v, q = randn(1, 2, 16, seed=1), randn(1, 2, 16, seed=2), randn(1, 4, 16, seed=3)
    for plan in plans:
        plan.write(LAYER, k, v)
    expected, actual = (plan.attend(LAYER, q, scale=0.7) for plan in plans)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_chunks(page_size: int, dtype: torch.dtype) -> None:
    chunks = [(0, 70), (33, 40), (5, 6), (64, 129)]
    pair = make_pair([0, 33, 5, 64], page_size=page_size, dtype=dtype)
    plans = [
        backend.plan_prefill(page_table_BP=pair.table_BP, chunks=chunks, device=CPU)
        for backend in (pair.reference, pair.triton)
    ]
    check(pair, plans, sum(end - start for start, end in chunks), 4)


def test_prompt_chunks_in_groups_of_seven() -> None:
    """Blocks of pairs end inside a row."""
    from eyas.kernels.triton_attention_prefill import PrefillConfig

    chunks = [(3, 30), (0, 12)]
    config = PrefillConfig(block_m=16, block_n=16, num_warps=1)
    pair = make_pair([3, 0], layout=ODD, prefill_config=config)
    plans = [
        backend.plan_prefill(page_table_BP=pair.table_BP, chunks=chunks, device=CPU)
        for backend in (pair.reference, pair.triton)
    ]
    check(pair, plans, 39, 21)


def rotary(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.rand(num_rows, 1, size // 2, generator=torch.Generator().manual_seed(8)) * 6
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def in_steps(
    plan: Any, qkv_TE: Tensor, turn: tuple[Tensor, Tensor], norms: HeadNorms | None
) -> tuple[Tensor, Tensor]:
    """(q, out) through the torch backend, step by step."""
    layout = plan._pool.layout
    num_kv, size, v_size = layout.num_kv_heads, layout.head_dim, layout.v_head_dim
    width = qkv_TE.shape[1] - num_kv * (size + v_size)
    parts = qkv_TE.split([width, num_kv * size, num_kv * v_size], dim=1)
    q, k, v = (
        x.unflatten(1, (-1, last)) for x, last in zip(parts, (size, size, v_size), strict=True)
    )
    if norms is not None:
        q = kernels.rms_norm(q, norms.q_D, norms.eps)
        k = kernels.rms_norm(k, norms.k_D, norms.eps)
    q, k = kernels.apply_rope(q, *turn), kernels.apply_rope(k, *turn)
    plan.write(LAYER, k.contiguous(), v.contiguous())
    return q, plan.attend(LAYER, q)


@pytest.mark.parametrize("layout", [GQA, ODD], ids=["equal", "odd"])
@pytest.mark.parametrize("rotated", [16, 8], ids=["whole", "partial"])
@pytest.mark.parametrize("with_norms", [False, True])
def test_rotation_and_attention_in_one_or_two_launches(
    layout: KVLayout, rotated: int, with_norms: bool
) -> None:
    lengths, num_heads, size = [61, 4], layout.num_kv_heads * 2, layout.head_dim
    norms = None
    if with_norms:
        norms = HeadNorms(randn(size, seed=6), randn(size, seed=7), 1e-5)
    width = num_heads * size + layout.num_kv_heads * (size + layout.v_head_dim)
    qkv_TE, turn = randn(6, width, seed=3), rotary(6, rotated)
    outputs = []
    for steps in (1, 2):
        pair = make_pair(lengths, layout=layout)
        expected_plan, plan = tree_plans(pair, lengths, chain(2, 3))
        q, expected = in_steps(expected_plan, qkv_TE, turn, norms)
        options = {"num_heads": num_heads, "norms": norms}
        if steps == 1:
            outputs.append(plan.attend_projection(LAYER, qkv_TE, turn, **options))
        else:
            q_THD = plan.rotate_and_write(LAYER, qkv_TE, turn, **options)
            torch.testing.assert_close(q_THD, q, atol=1e-5, rtol=1e-5)
            outputs.append(plan.attend(LAYER, q_THD))
        torch.testing.assert_close(outputs[-1], expected, atol=1e-5, rtol=1e-5)
        pair.assert_same_pools()


def test_a_tail_that_crosses_a_split_is_written_by_both() -> None:
    from eyas.kernels.triton_attention_plan import TreeConfig

    lengths, num_rows = [10], 30
    pair = make_pair(lengths, config=TreeConfig(block_n=16, min_blocks=1, waves=20))
    expected_plan, plan = tree_plans(pair, lengths, random_tree(1, num_rows, 0, seed=2))
    qkv_TE, turn = randn(num_rows, 8 * 16, seed=3), rotary(num_rows, 16)
    _, expected = in_steps(expected_plan, qkv_TE, turn, None)
    actual = plan.attend_projection(LAYER, qkv_TE, turn, num_heads=4)
    assert int(plan._work.items_IF[0, 4]) == 3
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    pair.assert_same_pools()


def test_writes_alone() -> None:
    """Rows wherever they are told, in steps or from a projection without queries."""
    rows = torch.tensor([45, 33, 50])
    k, v = randn(3, 2, 16, seed=1), randn(3, 2, 16, seed=2)
    pair = make_pair([0])
    for backend in (pair.reference, pair.triton):
        backend.plan_write(rows).write(LAYER, k.transpose(0, 1).contiguous().transpose(0, 1), v)
    pair.assert_same_pools()
    pair, turn = make_pair([0]), rotary(3, 16)
    pair.reference.plan_write(rows).write(LAYER, kernels.apply_rope(k, *turn), v)
    qkv_TE = torch.cat((k.flatten(1), v.flatten(1)), 1)
    q = pair.triton.plan_write(rows).rotate_and_write(LAYER, qkv_TE, turn, num_heads=0)
    assert q.shape == (3, 0, 16)
    pair.assert_same_pools()


def test_latent_attention_goes_to_torch() -> None:
    layout = KVLayout(2, 1, head_dim=24, v_head_dim=0, value_in_key=16)
    pair = make_pair([9], layout=layout)
    plans = tree_plans(pair, [9], chain(1, 2))
    assert type(plans[0]) is type(plans[1])
    for backend in (pair.reference, pair.triton):
        chunked = backend.plan_prefill(page_table_BP=pair.table_BP, chunks=[(9, 12)], device=CPU)
        assert type(chunked) is type(plans[0])
        assert type(backend.plan_write(torch.tensor([40]))) is type(plans[0])
