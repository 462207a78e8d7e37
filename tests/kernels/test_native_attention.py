"""Rotation and attention of few rows in C against the torch reference, and against fp64.

Shape suffixes as in eyas.kernels.native_attention.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas import kernels
from eyas.kernels import native, native_attention, reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """Skips where there is no compiler: nothing native to be tested then."""
    if not native.status().startswith("native"):
        pytest.skip(native.status())
    with torch.inference_mode():
        yield


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """fp32 to a few last places; bf16 to one rounding, of 2^-8."""
    tolerance = 3e-6 if expected.dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "rotary"),
    [(9, 3, 64, 64), (4, 4, 24, 24), (8, 2, 128, 64), (2, 1, 80, 20), (3, 1, 6, 2)],
)
def test_rope_write(
    num_heads: int, num_kv_heads: int, size: int, rotary: int, dtype: torch.dtype
) -> None:
    num_all = num_heads + 2 * num_kv_heads
    for num_rows in (1, 2, 7, 70):
        qkv_TE = random(num_rows, num_all * size, dtype=dtype)
        angle = 9 * random(num_rows, 1, rotary // 2, dtype=torch.float32, seed=1)
        cos = torch.cat((angle.cos(), angle.cos()), dim=-1).to(dtype)
        sin = torch.cat((-angle.sin(), angle.sin()), dim=-1).to(dtype)
        order = torch.randperm(90, generator=torch.Generator().manual_seed(2))
        write_T = order[:num_rows]
        k_RKD, v_RKD = (torch.full((90, num_kv_heads, size), 7.0, dtype=dtype) for _ in range(2))
        writer = kernels.plan_rope_write(
            qkv_TE, (cos, sin), write_T, (k_RKD, v_RKD), num_heads=num_heads
        )
        assert isinstance(writer, native_attention.RopeWriter)
        q_THD = writer(qkv_TE, k_RKD, v_RKD)
        heads = qkv_TE.view(num_rows, num_all, size)
        rotated = reference.apply_rope(heads[:, : num_heads + num_kv_heads], cos, sin)
        assert_close(q_THD, rotated[:, :num_heads])
        assert_close(k_RKD[write_T], rotated[:, num_heads:])
        torch.testing.assert_close(v_RKD[write_T], heads[:, -num_kv_heads:], rtol=0, atol=0)
        for cache in (k_RKD, v_RKD):
            assert (cache[order[num_rows:]] == 7).all()


def attention_in_fp64(
    q_THD: Tensor, read_BS: Tensor, bias_BQS: Tensor, cache: tuple[Tensor, Tensor]
) -> Tensor:
    """Softmax attention, row by row, over the positions that a row sees."""
    num_requests, num_queries, _ = bias_BQS.shape
    num_heads, size = q_THD.shape[1:]
    group = num_heads // cache[0].shape[1]
    out = torch.zeros(len(q_THD), num_heads, cache[1].shape[2], dtype=torch.float64)
    for row in range(len(q_THD)):
        request, query = divmod(row, num_queries)
        assert request < num_requests
        bias_S = bias_BQS[request, query].double()
        seen = bias_S > -math.inf
        if not seen.any():
            continue
        k, v = (c[read_BS[request, seen]].double().repeat_interleave(group, 1) for c in cache)
        score_HS = torch.einsum("hd,shd->hs", q_THD[row].double(), k) / math.sqrt(size)
        out[row] = torch.einsum("hs,shd->hd", (score_HS + bias_S[seen]).softmax(-1), v)
    return out.flatten(1)


def attention_case(
    shape: tuple[int, int, int], heads: tuple[int, int, int, int], dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """q, read, bias and cache: random masks, and NaN in every cache row that nobody sees."""
    num_requests, num_queries, num_read = shape
    num_heads, num_kv_heads, size, v_size = heads
    g = torch.Generator().manual_seed(seed)
    q_THD = random(num_requests * num_queries, num_heads, size, dtype=dtype, seed=seed)
    num_rows = num_requests * num_read + 5
    read_BS = torch.randperm(num_rows, generator=g)[: num_requests * num_read].view(
        num_requests, num_read
    )
    hidden_BS = torch.rand(num_requests, 1, num_read, generator=g) < 0.4
    some_BQS = torch.rand(shape, generator=g) < torch.tensor([0.0, 0.3])[seed % 2]
    hidden_BQS = hidden_BS | some_BQS
    hidden_BQS[:, :, num_read // 2] = False
    bias_BQS = torch.zeros(shape, dtype=dtype).masked_fill_(hidden_BQS, float("-inf"))
    cache = (
        random(num_rows, num_kv_heads, size, dtype=dtype, seed=seed + 1),
        random(num_rows, num_kv_heads, v_size, dtype=dtype, seed=seed + 2),
    )
    unseen = torch.ones(num_rows, dtype=torch.bool)
    unseen[read_BS[~hidden_BQS.all(1)]] = False
    for tensor in cache:
        tensor[unseen] = float("nan")
    return q_THD, read_BS, bias_BQS, cache


HEADS = [(9, 3, 64, 64), (4, 4, 24, 16), (8, 1, 128, 128), (6, 2, 80, 80), (2, 2, 5, 7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_attention(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    shapes = [(1, 1, 1), (1, 1, 16), (2, 1, 33), (3, 5, 47), (1, 16, 130), (1, 64, 70), (2, 1, 700)]
    for seed, shape in enumerate(shapes):
        q_THD, read_BS, bias_BQS, cache = attention_case(shape, heads, dtype, seed)
        attend = kernels.plan_attention(q_THD, (read_BS.view(-1), bias_BQS), cache)
        assert isinstance(attend, native_attention.FewRowsAttention), shape
        out = q_THD.new_empty(len(q_THD), heads[0] * heads[3])
        attend(q_THD, *cache, out)
        assert_close(out, attention_in_fp64(q_THD, read_BS, bias_BQS, cache).to(dtype))


def test_attention_of_strided_queries_hidden_rows_and_other_biases() -> None:
    """Queries within wider rows; a row that sees nothing; a position that only one row may read,
    though it holds NaN; biases that are neither 0 nor -inf."""
    q_THD, read_BS, bias_BQS, cache = attention_case((2, 3, 40), (4, 2, 64, 64), torch.float32, 0)
    bias_BQS += random(2, 3, 40, dtype=torch.float32, seed=9)
    bias_BQS[0, 1] = float("-inf")
    bias_BQS[1, :2, 7], bias_BQS[1, 2, 7] = float("-inf"), 0.0
    for tensor in cache:
        tensor[read_BS[1, 7]] = float("nan")
    wide = torch.cat((q_THD, torch.full_like(q_THD, float("nan"))), dim=1)
    q = wide[:, :4]
    attend = native_attention.FewRowsAttention(q, (read_BS.view(-1), bias_BQS), cache)
    out = torch.empty(6, 4 * 64)
    attend(q, *cache, out)
    expected = attention_in_fp64(q_THD, read_BS, bias_BQS, cache).float()
    assert_close(out[:5], expected[:5])
    assert (out[1] == 0).all() and out[5].isnan().all()


def test_large_attention_is_left_to_torch() -> None:
    cache = (torch.zeros(4, 8, 64), torch.zeros(4, 8, 64))
    for num_queries, served in ((1, True), (1024, False)):
        bias_BQS = torch.zeros(1, num_queries, 2048)
        q_THD = torch.zeros(num_queries, 8, 64)
        read_T = torch.zeros(2048, dtype=torch.int64)
        plan = kernels.plan_attention(q_THD, (read_T, bias_BQS), cache)
        assert (plan is not None) == served


def test_attention_of_a_prompt_chunk_is_left_to_torch() -> None:
    cache = (torch.zeros(4, 1, 8), torch.zeros(4, 1, 8))
    for num_queries, served in ((64, True), (65, False)):
        bias_BQS, q_THD = torch.zeros(1, num_queries, 4), torch.zeros(num_queries, 1, 8)
        plan = kernels.plan_attention(q_THD, (torch.arange(4), bias_BQS), cache)
        assert (plan is not None) == served


def test_attention_of_one_row_equals_sdpa() -> None:
    q_THD, read_BS, bias_BQS, cache = attention_case((1, 1, 150), HEADS[0], torch.float32, 2)
    out = torch.empty(1, 9 * 64)
    native_attention.FewRowsAttention(q_THD, (read_BS.view(-1), bias_BQS), cache)(
        q_THD, *cache, out
    )
    seen = read_BS[0, bias_BQS[0, 0] == 0]
    k, v = (c[seen].transpose(0, 1)[None] for c in cache)
    expected = F.scaled_dot_product_attention(q_THD.transpose(0, 1)[None], k, v, enable_gqa=True)
    assert_close(out, expected.reshape(1, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first_index", [0, 1])
def test_a_tree_is_read_by_its_page_table(first_index: int, dtype: torch.dtype) -> None:
    """Page tables, lengths (none at all, past the bound) and masks (a node that nobody sees, a
    strided one) against the same rows written out; whatever nobody sees is NaN."""
    generator = torch.Generator().manual_seed(7)
    page_size, num_pages, num_scratch, num_slots = 4, 12, 9, 4
    first_scratch, bound = num_pages * page_size, 21
    table_BP = torch.stack([torch.randperm(num_pages, generator=generator) for _ in range(3)])
    table_BP = table_BP[:, :7]
    slots_B, end_B = torch.tensor([2, 0, 3]), torch.tensor([13, 0, 30])
    visible_BQN = torch.rand(3, 7, 5, generator=generator).transpose(1, 2) < 0.5
    visible_BQN[:, torch.arange(5), torch.arange(5) + 2] = True
    visible_BQN[0, :, 1] = False
    tree = kernels.plan_tree_rows(
        table_BP,
        slots_B,
        end_B,
        visible_BQN,
        first_index=first_index,
        last_index=bound,
        first_node=2,
        page_size=page_size,
        scratch=(first_scratch, num_scratch),
    )
    assert tree is not None
    written = first_scratch + slots_B[:, None] * num_scratch + 2 + torch.arange(5)
    assert tree.write_T.tolist() == written.reshape(-1).tolist()
    index_S = torch.arange(first_index, bound)
    prefix_BS = table_BP[:, index_S // page_size] * page_size + index_S % page_size
    tail_BN = first_scratch + slots_B[:, None] * num_scratch + torch.arange(7)
    in_prefix_BQS = (index_S < end_B[:, None])[:, None].expand(-1, 5, -1)
    allowed_BQS = torch.cat((in_prefix_BQS, visible_BQN), dim=2)
    read_BS = torch.cat((prefix_BS, tail_BN), dim=1)
    num_rows = first_scratch + num_slots * num_scratch
    seen = torch.zeros(num_rows, dtype=torch.bool)
    for request in range(3):
        seen[read_BS[request, allowed_BQS[request].any(0)]] = True
    cache = tuple(random(num_rows, 2, 24, dtype=dtype, seed=i) for i in range(2))
    for tensor in cache:
        tensor[~seen] = float("nan")
    q_THD = random(15, 6, 24, dtype=dtype, seed=5)
    attend = kernels.plan_attention(q_THD, tree, (cache[0], cache[1]))
    assert isinstance(attend, native_attention.FewRowsAttention)
    out = torch.empty(15, 6 * 24, dtype=dtype)
    attend(q_THD, *cache, out)
    bias_BQS = torch.zeros(allowed_BQS.shape, dtype=dtype).masked_fill(~allowed_BQS, -math.inf)
    expected = attention_in_fp64(q_THD, read_BS, bias_BQS, (cache[0], cache[1]))
    assert_close(out, expected.to(dtype))
