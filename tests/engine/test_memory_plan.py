"""The memory plan: exact parts against real pools, and every promise about what fits."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.cache.pool import NUM_RESERVED_PAGES, KVPool
from eyas.config import PLAIN, TreeShape
from eyas.contract.attention import KVLayout
from eyas.engine.memory_plan import MemoryNeed, MemoryPlan, plan_memory
from eyas.models.config import DraftConfig, ModelConfig, RopeConfig

LAYER = ModelConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
DRAFT = DraftConfig(
    format="safeailab",
    decoder=dataclasses.replace(LAYER, num_layers=1),
    target_hidden_size=64,
    draft_vocab_size=97,
    boundaries=(2, 4, 5),
    boundary_rule="",
)
NEED = MemoryNeed(
    target=LAYER,
    draft=DRAFT,
    target_weight_bytes=100_000,
    draft_weight_bytes=20_000,
    packed_bytes=3_000,
    target_layout=KVLayout(8, 2, 16, 16),
    draft_layout=KVLayout(1, 2, 16, 12),
    dtype=torch.bfloat16,
    tree=TreeShape(3, 2, 8),
    page_size=16,
    max_batch_size=4,
    prefill_chunk_tokens=32,
    default_model_len=512,
)


def need(**changes: object) -> MemoryNeed:
    return dataclasses.replace(NEED, **changes)  # type: ignore[arg-type]


def total(plan: MemoryPlan) -> int:
    parts = {k: v for k, v in dataclasses.asdict(plan).items() if k.endswith("_bytes")}
    del parts["total_bytes"], parts["budget_bytes"]
    return sum(parts.values())


def test_pools_take_what_was_planned() -> None:
    plan = plan_memory(NEED, budget_bytes=None)
    assert NEED.draft_layout is not None
    pools = [
        KVPool(
            layout,
            num_pages=plan.num_pages,
            page_size=NEED.page_size,
            num_slots=NEED.max_batch_size + 1,
            num_scratch_rows=NEED.shape(4, 512).num_scratch_rows,
            dtype=torch.bfloat16,
            device="meta",
        )
        for layout in (NEED.target_layout, NEED.draft_layout)
    ]
    assert sum(pool.num_bytes for pool in pools) == plan.kv_bytes + plan.scratch_bytes


def test_without_limits_the_whole_batch_has_room() -> None:
    plan = plan_memory(NEED, budget_bytes=None)
    assert (plan.fits, plan.max_model_len, plan.kv_tokens) == (True, 512, 4 * 512)
    assert plan.num_pages == 4 * 32 + NUM_RESERVED_PAGES
    assert plan.total_bytes == total(plan)
    assert (plan.longest_one, plan.longest_batch, plan.largest_batch) == (None, None, None)


@pytest.mark.parametrize("tokens", [1, 16, 100, 5000])
def test_the_asked_number_of_tokens(tokens: int) -> None:
    plan = plan_memory(need(kv_cache_tokens=tokens), budget_bytes=1 << 40)
    assert tokens <= plan.kv_tokens < tokens + 16


def test_a_length_that_is_not_a_multiple_of_the_page() -> None:
    plan = plan_memory(need(max_model_len=100), budget_bytes=None)
    assert (plan.max_model_len, plan.kv_tokens) == (100, 4 * 112)


def test_pages_shrink_before_the_length_does() -> None:
    whole = plan_memory(NEED, budget_bytes=None).total_bytes
    plan = plan_memory(NEED, budget_bytes=whole - 1)
    assert plan.fits and plan.max_model_len == 512
    assert plan.num_pages == 4 * 32 + NUM_RESERVED_PAGES - 1


def test_an_asked_length_is_not_cut() -> None:
    one = NEED.total_bytes(4, 512, NEED.num_pages(1, 512))
    assert plan_memory(need(max_model_len=512), budget_bytes=one).fits
    plan = plan_memory(need(max_model_len=512), budget_bytes=one - 1)
    assert not plan.fits and plan.max_model_len == 512
    assert plan.longest_one is not None and 0 < plan.longest_one < 512
    cut = plan_memory(NEED, budget_bytes=one - 1)
    assert cut.fits and cut.max_model_len == plan.longest_one


def test_weights_alone_do_not_fit() -> None:
    plan = plan_memory(NEED, budget_bytes=NEED.weight_bytes)
    assert not plan.fits
    assert (plan.longest_one, plan.longest_batch, plan.largest_batch) == (0, 0, 0)


def test_plain_decoding_needs_one_scratch_row() -> None:
    plain = need(draft=None, draft_layout=None, tree=PLAIN)
    assert plain.bytes_per_token == 8 * 2 * 32 * 2
    assert plain.scratch_bytes(4) == 5 * plain.bytes_per_token
    assert plain.page_bytes == 16 * plain.bytes_per_token
    # A deep narrow tree runs more draft rows than it verifies.
    deep = need(tree=TreeShape(5, 8, 16))
    assert deep.scratch_bytes(4) == 5 * 32 * deep.bytes_per_token


@given(
    budget=st.integers(100_000, 5_000_000),
    max_model_len=st.none() | st.integers(1, 600),
    kv_cache_tokens=st.none() | st.integers(1, 4000),
    batch=st.integers(1, 40),
)
def test_promises(
    budget: int, max_model_len: int | None, kv_cache_tokens: int | None, batch: int
) -> None:
    asked = need(max_model_len=max_model_len, kv_cache_tokens=kv_cache_tokens, max_batch_size=batch)
    plan = plan_memory(asked, budget_bytes=budget)
    assert plan.total_bytes == total(plan)
    assert plan.fits == (plan.total_bytes <= budget)
    if max_model_len is not None:
        assert plan.max_model_len == max_model_len
    if plan.fits and kv_cache_tokens is None:
        assert plan.kv_tokens >= plan.max_model_len
    # What is offered fits, and one more does not.
    assert plan.largest_batch is not None and plan.longest_one is not None
    open_need = dataclasses.replace(asked, kv_cache_tokens=None)
    if plan.largest_batch:
        length = plan.max_model_len
        better = dataclasses.replace(
            open_need, max_batch_size=plan.largest_batch, max_model_len=length
        )
        assert plan_memory(better, budget_bytes=budget).fits
        assert asked.total_bytes(plan.largest_batch + 1, length) > budget
    if plan.longest_one:
        better = dataclasses.replace(open_need, max_model_len=plan.longest_one)
        assert plan_memory(better, budget_bytes=budget).fits
    if plan.longest_batch:
        assert asked.total_bytes(batch, plan.longest_batch) <= budget
