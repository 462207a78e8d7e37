"""How much memory an engine needs, before anything is allocated: a pure function of sizes.

    weights of both models (and second copies that the CPU's packed layout keeps)
  + pages of both KV pools (target and draft share page ids, so one count serves both)
  + scratch rows of every slot, in both pools
  + rotary tables and page tables
  + activations of the largest forward

The activations are an upper estimate for the reference attention, which gathers the keys and
values of one layer; everything else is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.config import MAX_TREE_NODES, TreeShape
from eyas.contract.attention import KVLayout
from eyas.models.config import DraftConfig, ModelConfig

MIN_MODEL_LEN = 64  # a device that holds less is called too small
_MAX_BATCH = 1 << 16
_LOGITS_BYTES = 12  # a logit in fp32, its noise and its perturbed score


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """What the plan is made for. Sizes in bytes unless a name says otherwise.

    target_layout, draft_layout: KV of one token. dtype_bytes: of weights, KV and activations.
    max_model_len: None takes the longest up to default_model_len that fits; a number must fit.
    kv_cache_tokens: None takes the whole batch at full length, or what fits.
    """

    target: ModelConfig
    draft: DraftConfig | None
    target_weight_bytes: int
    draft_weight_bytes: int
    packed_bytes: int
    target_layout: KVLayout
    draft_layout: KVLayout | None
    dtype_bytes: int
    tree: TreeShape
    page_size: int
    max_batch_size: int
    prefill_chunk_tokens: int
    default_model_len: int
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None

    @property
    def weight_bytes(self) -> int:
        """Both models and the second copies."""
        return self.target_weight_bytes + self.draft_weight_bytes + self.packed_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV of one token in both pools."""
        draft = self.draft_layout.elements_per_token if self.draft_layout else 0
        return (self.target_layout.elements_per_token + draft) * self.dtype_bytes

    @property
    def page_bytes(self) -> int:
        """One page in both pools."""
        return self.page_size * self.bytes_per_token

    @property
    def num_scratch_rows(self) -> int:
        """Scratch rows a slot: the verified tree or the draft's own rows, the larger."""
        return max(self.tree.num_nodes, self.tree.num_draft_rows, 1)

    def scratch_bytes(self, batch_size: int) -> int:
        """Scratch of all slots and the trash slot, in both pools."""
        return (batch_size + 1) * self.num_scratch_rows * self.bytes_per_token

    def table_bytes(self, batch_size: int, model_len: int) -> int:
        """Cosines and sines of both models by position, and the page tables (int64)."""
        heads = [self.target] + ([self.draft.decoder] if self.draft else [])
        width = sum(int(config.head_dim * config.rope.partial) for config in heads)
        positions = model_len + MAX_TREE_NODES
        num_pages = -(-(positions + 1) // self.page_size)
        return 2 * positions * width * self.dtype_bytes + (batch_size + 1) * num_pages * 8

    def num_pages(self, batch_size: int, model_len: int) -> int:
        """Pages that hold the whole batch at full length, the reserved ones included."""
        return batch_size * -(-model_len // self.page_size) + NUM_RESERVED_PAGES

    def activation_bytes(self, batch_size: int, model_len: int) -> int:
        """The largest forward: a round over the batch or a prompt chunk, whichever is larger."""
        target, size = self.target, self.dtype_bytes
        round_rows = batch_size * self.num_scratch_rows
        chunk_rows = min(self.prefill_chunk_tokens, model_len)
        width = 6 * target.hidden_size + 3 * target.intermediate_size
        width += 3 * target.num_heads * target.head_dim
        width += self.draft.num_features if self.draft else 0
        layer = self.target_layout
        gathered = layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) * size + 8
        mask_copies = 1 + target.num_heads // target.num_kv_heads

        def forward(rows: int, requests: int) -> int:
            masks = rows * mask_copies * size
            return rows * width * size + model_len * (requests * gathered + masks)

        logits = round_rows * target.vocab_size * _LOGITS_BYTES
        return max(forward(round_rows, batch_size) + logits, forward(chunk_rows, 1))

    def total_bytes(self, batch_size: int, model_len: int, num_pages: int | None = None) -> int:
        """Everything, with pages for the whole batch at full length unless a count is given."""
        if num_pages is None:
            num_pages = self.num_pages(batch_size, model_len)
        fixed = self.weight_bytes + self.scratch_bytes(batch_size)
        fixed += self.table_bytes(batch_size, model_len)
        return fixed + self.activation_bytes(batch_size, model_len) + num_pages * self.page_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The sizes to build with, and what they cost.

    fits: whether it all goes into budget_bytes (always true when no budget is known).
    num_pages: of each pool, the reserved ones included. kv_tokens: tokens that they hold.
    longest_one: the longest model length if one request ran at a time; longest_batch: if all
    max_batch_size did at full length; largest_batch: requests at max_model_len. Each is 0 where
    nothing fits; None without a budget.
    """

    fits: bool
    max_model_len: int
    num_pages: int
    kv_tokens: int
    target_weight_bytes: int
    draft_weight_bytes: int
    packed_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    scratch_bytes: int
    table_bytes: int
    activation_bytes: int
    total_bytes: int
    budget_bytes: int | None
    longest_one: int | None = None
    longest_batch: int | None = None
    largest_batch: int | None = None


def plan_memory(need: MemoryNeed, *, budget_bytes: int | None) -> MemoryPlan:
    """Choose model length and pages within a budget (None: unknown, everything is granted)."""
    batch = need.max_batch_size
    limit = max(need.default_model_len, need.max_model_len or 0)
    model_len = need.max_model_len or need.default_model_len
    if budget_bytes is None:
        return _plan(need, model_len, _wanted_pages(need, model_len), budget_bytes=None)

    def one_request(length: int) -> bool:
        pages = need.num_pages(1, length)
        return need.total_bytes(batch, length, pages) <= budget_bytes

    longest_one = _largest(one_request, limit)
    if need.max_model_len is None and need.kv_cache_tokens is None:
        if longest_one >= min(MIN_MODEL_LEN, model_len):
            model_len = min(model_len, longest_one)
    wanted = _wanted_pages(need, model_len)
    if need.kv_cache_tokens is None:
        rest = budget_bytes - need.total_bytes(batch, model_len, 0)
        granted = max(rest // need.page_bytes, need.num_pages(1, model_len))
        wanted = min(wanted, granted)
    return _plan(
        need,
        model_len,
        wanted,
        budget_bytes=budget_bytes,
        longest_one=longest_one,
        longest_batch=longest_length(need, batch_size=batch, budget_bytes=budget_bytes),
        largest_batch=_largest(
            lambda n: need.total_bytes(n, model_len) <= budget_bytes, _MAX_BATCH
        ),
    )


def longest_length(need: MemoryNeed, *, batch_size: int, budget_bytes: int) -> int:
    """The longest model length at which `batch_size` requests fit at once, 0 if none does."""
    limit = max(need.default_model_len, need.max_model_len or 0)
    return _largest(lambda n: need.total_bytes(batch_size, n) <= budget_bytes, limit)


def _wanted_pages(need: MemoryNeed, model_len: int) -> int:
    if need.kv_cache_tokens is not None:
        return need.num_pages(1, need.kv_cache_tokens)
    return need.num_pages(need.max_batch_size, model_len)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in 1..most that fits (fits is true up to some n), 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _plan(
    need: MemoryNeed,
    model_len: int,
    num_pages: int,
    *,
    budget_bytes: int | None,
    longest_one: int | None = None,
    longest_batch: int | None = None,
    largest_batch: int | None = None,
) -> MemoryPlan:
    total = need.total_bytes(need.max_batch_size, model_len, num_pages)
    return MemoryPlan(
        fits=budget_bytes is None or total <= budget_bytes,
        max_model_len=model_len,
        num_pages=num_pages,
        kv_tokens=(num_pages - NUM_RESERVED_PAGES) * need.page_size,
        target_weight_bytes=need.target_weight_bytes,
        draft_weight_bytes=need.draft_weight_bytes,
        packed_bytes=need.packed_bytes,
        kv_bytes=num_pages * need.page_bytes,
        kv_bytes_per_token=need.bytes_per_token,
        scratch_bytes=need.scratch_bytes(need.max_batch_size),
        table_bytes=need.table_bytes(need.max_batch_size, model_len),
        activation_bytes=need.activation_bytes(need.max_batch_size, model_len),
        total_bytes=total,
        budget_bytes=budget_bytes,
        longest_one=longest_one,
        longest_batch=longest_batch,
        largest_batch=largest_batch,
    )
