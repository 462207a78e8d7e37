"""One rank: models, pools and slots on a device, driven by plain data (design D6, D10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from eyas.attention.torch_backend import TorchBackend
from eyas.cache.pool import KVPool
from eyas.config import MAX_TREE_NODES, TreeShape
from eyas.contract.draft import Draft
from eyas.contract.target import Target
from eyas.speculative.round import DraftSide, PrefillChunk, RoundRunner
from eyas.speculative.state import SlotSettings, SlotState

KV_LEN_STEP = 64  # lengths are rounded up to this, so that shapes repeat


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerShape:
    """Sizes of a worker. num_slots: requests at once (a trash slot is added). num_pages includes
    the reserved pages. tree: the speculative shape (PLAIN without a draft)."""

    num_slots: int
    num_pages: int
    page_size: int
    max_model_len: int
    tree: TreeShape

    @property
    def max_pages(self) -> int:
        """Width of a page table: the model length and the rows that a round may look past it."""
        return -(-(self.max_model_len + MAX_TREE_NODES + 1) // self.page_size)

    @property
    def num_scratch_rows(self) -> int:
        """Scratch rows a slot, in the target's pool and in the draft's alike."""
        return max(self.tree.num_nodes, self.tree.num_draft_rows, 1)


@dataclasses.dataclass(frozen=True)
class RoundResult:
    """What a round or a prefill told about one slot. finish: kernels.NO_FINISH and so on."""

    token_ids: tuple[int, ...]
    finish: int
    num_accepted: int


class Pending:
    """Results on their way to the host; `read` waits for them."""

    def __init__(self, packed: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = packed
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[RoundResult]:
        """One result per slot of the launch."""
        if self._event is not None:
            self._event.synchronize()
        width = self._host.shape[1] - 3
        return [
            RoundResult(
                tuple(row[: row[width]]), finish=row[width + 1], num_accepted=row[width + 2]
            )
            for row in self._host.tolist()
        ]


class Worker:
    """Runs prefill chunks and rounds. Results are not waited for: they come as `Pending`."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        *,
        shape: WorkerShape,
        dtype: torch.dtype,
        draft_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.shape, self.draft = shape, draft
        self._device = torch.device(device)
        if draft is not None:
            target.set_eagle3_layers_to_capture(draft.boundaries)
        self.target_pool = self._pool(target, dtype)
        self.draft_pool = None if draft is None else self._pool(draft, draft_dtype)
        self.state = SlotState(
            num_slots=shape.num_slots + 1,
            max_pages=shape.max_pages,
            draft_hidden_size=1 if draft is None else draft.hidden_size,
            draft_dtype=draft_dtype,
            topk=shape.tree.topk,
            device=device,
        )
        side = None
        if draft is not None and self.draft_pool is not None:
            side = DraftSide(draft, TorchBackend(self.draft_pool))
        self.runner = RoundRunner(
            target=target, backend=TorchBackend(self.target_pool), state=self.state, draft=side
        )

    def _pool(self, model: Target | Draft, dtype: torch.dtype) -> KVPool:
        return KVPool(
            model.kv_layout,
            num_pages=self.shape.num_pages,
            page_size=self.shape.page_size,
            num_slots=self.shape.num_slots + 1,
            num_scratch_rows=self.shape.num_scratch_rows,
            dtype=dtype,
            device=self._device,
        )

    def admit(self, slot: int, settings: SlotSettings, prompt_token_ids: Sequence[int]) -> None:
        """A request enters a slot."""
        self.state.admit(slot, settings)
        if self.draft is not None:
            self.draft.bind(slot, prompt_token_ids)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Replace a slot's page table."""
        self.state.set_pages(slot, pages)

    def release(self, slot: int) -> None:
        """A request leaves its slot; launched rounds still see it, later ones do not."""
        self.state.release(slot)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk], *, sampled: bool) -> Pending:
        """Launch prompt chunks; one result per chunk (empty where the prompt goes on)."""
        speculative = self.draft is not None and self.shape.tree.depth > 0
        return Pending(self.runner.prefill(chunks, sampled=sampled, prime=speculative))

    @torch.inference_mode()
    def round(self, slots: Sequence[int], *, max_kv_len: int, sampled: bool) -> Pending:
        """Launch one round over the slots; no length of theirs is above max_kv_len."""
        max_kv_len = -(-max_kv_len // KV_LEN_STEP) * KV_LEN_STEP
        slots_B = torch.tensor(slots, device=self._device)
        packed = self.runner.round(slots_B, self.shape.tree, max_kv_len=max_kv_len, sampled=sampled)
        return Pending(packed)
