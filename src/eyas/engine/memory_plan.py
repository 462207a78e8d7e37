"""How much memory an engine needs, before anything is allocated: a pure function of sizes.

    weights of both models (and second copies that the CPU's packed layout keeps)
  + pages of both KV pools (target and draft share page ids, so one count serves both), and of
    each page the draft's input at its last token
  + scratch rows of every slot, in both pools
  + the state of every slot (penalty counts by token are the most of it) with its page table
  + rotary tables
  + activations of the largest forward (memory_activations)

Everything but the activations is exact.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.config import MAX_TREE_NODES, TreeShape
from eyas.contract.attention import KVLayout
from eyas.engine.memory_activations import Activations
from eyas.engine.worker import WorkerShape
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.sharding import WHOLE, Parallel, local_config
from eyas.speculative.state import SlotState

MIN_MODEL_LEN = 64  # a device that holds less is called too small
_MAX_BATCH = 1 << 16


@functools.cache
def slot_state_bytes(
    *, vocab_size: int, draft_hidden_size: int, dtype: torch.dtype, topk: int
) -> tuple[int, int]:
    """(bytes of one slot's state without its page table, bytes of a page table's entry).

    Read off the very tensors, made on the meta device.
    """

    def measure(max_pages: int) -> int:
        state = SlotState(
            num_slots=1,
            max_pages=max_pages,
            vocab_size=vocab_size,
            draft_hidden_size=draft_hidden_size,
            draft_dtype=dtype,
            topk=topk,
            device="meta",
        )
        return sum(value.nbytes for value in vars(state).values() if isinstance(value, Tensor))

    return measure(0), measure(1) - measure(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """What the plan is made for. Sizes in bytes unless a name says otherwise.

    target_layout, draft_layout: KV of one token. dtype: of weights, KV and activations;
    draft_dtype: the draft's, if it is another one. parallel: whose part it is; sizes are a rank's.
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
    dtype: torch.dtype
    tree: TreeShape
    page_size: int
    max_batch_size: int
    prefill_chunk_tokens: int
    default_model_len: int
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    draft_dtype: torch.dtype | None = None
    parallel: Parallel = WHOLE

    @property
    def dtype_of_draft(self) -> torch.dtype:
        """What the draft runs in."""
        return self.draft_dtype or self.dtype

    @property
    def weight_bytes(self) -> int:
        """Both models and the second copies."""
        return self.target_weight_bytes + self.draft_weight_bytes + self.packed_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV of one token in both pools."""
        draft = self.draft_layout.elements_per_token if self.draft_layout else 0
        target_bytes = self.target_layout.elements_per_token * self.dtype.itemsize
        return target_bytes + draft * self.dtype_of_draft.itemsize

    @property
    def page_end_bytes(self) -> int:
        """The draft's input that a page keeps of its last token."""
        size = self.dtype_of_draft.itemsize
        return self.draft.decoder.hidden_size * size if self.draft else 0

    @property
    def page_bytes(self) -> int:
        """One page in both pools, and what is kept beside it."""
        return self.page_size * self.bytes_per_token + self.page_end_bytes

    def shape(self, batch_size: int, model_len: int) -> WorkerShape:
        """What a worker would be made with, pages for the whole batch at full length."""
        return WorkerShape(
            num_slots=batch_size,
            num_pages=self.num_pages(batch_size, model_len),
            page_size=self.page_size,
            max_model_len=model_len,
            tree=self.tree,
        )

    def scratch_bytes(self, batch_size: int) -> int:
        """Scratch of all slots and the trash slot, in both pools."""
        num_rows = self.shape(batch_size, 1).num_scratch_rows
        return (batch_size + 1) * num_rows * self.bytes_per_token

    def slot_bytes(self, batch_size: int, model_len: int) -> int:
        """State of all slots and the trash slot, page tables included."""
        fixed, per_page = slot_state_bytes(
            vocab_size=self.target.vocab_size,
            draft_hidden_size=self.draft.decoder.hidden_size if self.draft else 1,
            dtype=self.dtype_of_draft,
            topk=self.tree.topk,
        )
        num_pages = self.shape(batch_size, model_len).max_pages
        return (batch_size + 1) * (fixed + num_pages * per_page)

    def table_bytes(self, model_len: int) -> int:
        """Cosines and sines of both models by position, and the target's id of each draft id."""
        heads = [(self.target, self.dtype)]
        if self.draft is not None:
            heads.append((self.draft.decoder, self.dtype_of_draft))
        row_bytes = sum(
            int(config.head_dim * config.rope.partial) * dtype.itemsize for config, dtype in heads
        )
        ids = self.draft.draft_vocab_size * torch.int64.itemsize if self.draft else 0
        return 2 * (model_len + MAX_TREE_NODES) * row_bytes + ids

    def num_pages(self, batch_size: int, model_len: int) -> int:
        """Pages that hold the whole batch at full length, the reserved ones included."""
        return batch_size * -(-model_len // self.page_size) + NUM_RESERVED_PAGES

    @functools.cached_property
    def activations(self) -> Activations:
        """What the forwards allocate."""
        draft = self.draft
        if draft is not None:
            decoder = local_config(draft.decoder, self.parallel)
            draft = dataclasses.replace(draft, decoder=decoder)
        return Activations(
            target=local_config(self.target, self.parallel),
            draft=draft,
            tree=self.tree,
            page_size=self.page_size,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            dtype_bytes=self.dtype.itemsize,
            draft_dtype_bytes=self.dtype_of_draft.itemsize,
        )

    def total_bytes(self, batch_size: int, model_len: int, num_pages: int | None = None) -> int:
        """Everything, with pages for the whole batch at full length unless a count is given."""
        if num_pages is None:
            num_pages = self.num_pages(batch_size, model_len)
        fixed = self.weight_bytes + self.scratch_bytes(batch_size)
        fixed += self.slot_bytes(batch_size, model_len) + self.table_bytes(model_len)
        fixed += self.activations.peak(batch_size, model_len)
        return fixed + num_pages * self.page_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The sizes to build with, and what they cost.

    fits: whether it all goes into budget_bytes (always true when no budget is known).
    num_pages: of each pool, the reserved ones included. kv_tokens: tokens that they hold.
    page_end_bytes: the draft's input at each page's end; slot_bytes: the state of all slots.
    longest_one: the longest model length if one request ran at a time; longest_batch: if all
    max_batch_size did at full length; largest_batch: requests at max_model_len. Each is 0 where
    nothing fits; None without a budget. num_ranks: how many need as much each.
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
    page_end_bytes: int
    scratch_bytes: int
    slot_bytes: int
    table_bytes: int
    activation_bytes: int
    total_bytes: int
    budget_bytes: int | None
    longest_one: int | None = None
    longest_batch: int | None = None
    largest_batch: int | None = None
    num_ranks: int = 1


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
    batch = need.max_batch_size
    total = need.total_bytes(batch, model_len, num_pages)
    return MemoryPlan(
        fits=budget_bytes is None or total <= budget_bytes,
        max_model_len=model_len,
        num_pages=num_pages,
        kv_tokens=(num_pages - NUM_RESERVED_PAGES) * need.page_size,
        target_weight_bytes=need.target_weight_bytes,
        draft_weight_bytes=need.draft_weight_bytes,
        packed_bytes=need.packed_bytes,
        kv_bytes=num_pages * need.page_size * need.bytes_per_token,
        kv_bytes_per_token=need.bytes_per_token,
        page_end_bytes=num_pages * need.page_end_bytes,
        scratch_bytes=need.scratch_bytes(batch),
        slot_bytes=need.slot_bytes(batch, model_len),
        table_bytes=need.table_bytes(model_len),
        activation_bytes=need.activations.peak(batch, model_len),
        total_bytes=total,
        budget_bytes=budget_bytes,
        longest_one=longest_one,
        longest_batch=longest_batch,
        largest_batch=largest_batch,
        num_ranks=need.parallel.group.size,
    )
