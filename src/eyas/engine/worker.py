"""One rank: models, pools and slots on a device, driven by plain data (design D6, D10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from eyas import kernels
from eyas.attention.choose import Choice, choose_backend
from eyas.cache.pool import KVPool
from eyas.config import MAX_TREE_NODES, PLAIN, TreeShape
from eyas.contract.draft import Draft
from eyas.contract.target import Target
from eyas.contract.vision import ImageEncoder
from eyas.engine.graph import PartTimer, RoundGraphs
from eyas.engine.image_rows import ImageRows
from eyas.kernels import SamplingMode
from eyas.speculative.proposer import Proposer
from eyas.speculative.round import PrefillChunk, RoundOutput, RoundRunner
from eyas.speculative.simulate import SimulatedAcceptance
from eyas.speculative.state import SlotSettings, SlotState
from eyas.types import TokenLogprob

T = TypeVar("T")

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
    """What a round or a prefill told about one slot. finish: kernels.NO_FINISH and so on.

    logprobs: one a token, where the launch's mode asked for them.
    """

    token_ids: tuple[int, ...]
    finish: int
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...] = ()


class Pending:
    """Results on their way to the host; `read` waits for them."""

    def __init__(self, output: RoundOutput, timer: PartTimer | None = None) -> None:
        self._timer = timer
        self._event: torch.cuda.Event | None = None
        tensors = (output.packed, output.logprob_id, output.logprob)
        self._packed, self._ids, self._values = (t if t is None else _to_host(t) for t in tensors)
        if output.packed.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[RoundResult]:
        """One result per slot of the launch."""
        if self._event is not None:
            self._event.synchronize()
        assert self._packed is not None
        results = []
        for number, row in enumerate(self._packed.tolist()):
            num_emitted, finish, num_accepted = row[-3:]
            logprobs = self._logprobs(number, num_emitted)
            results.append(RoundResult(tuple(row[:num_emitted]), finish, num_accepted, logprobs))
        return results

    def part_seconds(self) -> dict[str, float]:
        """Device time by part of a round that was read, where it was measured."""
        return {} if self._timer is None else self._timer.seconds()

    def _logprobs(self, number: int, num_emitted: int) -> tuple[TokenLogprob, ...]:
        if self._ids is None or self._values is None:
            return ()
        ids = self._ids[number, :num_emitted].tolist()
        values = self._values[number, :num_emitted].tolist()
        return tuple(
            TokenLogprob(token[0], value[0], tuple(zip(token[1:], value[1:], strict=True)))
            for token, value in zip(ids, values, strict=True)
        )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Worker:
    """Runs prefill chunks and rounds. Results are not waited for: they come as `Pending`.

    simulate_acceptance: chances by draft level of the worker's tree (benchmarks). cuda_graphs: on
    a GPU, replay rounds as graphs. attention: see attention.choose. max_image_tokens: of the
    largest image; 0 takes none.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        *,
        shape: WorkerShape,
        dtype: torch.dtype,
        draft_dtype: torch.dtype,
        device: torch.device | str,
        simulate_acceptance: tuple[float, ...] | None = None,
        cuda_graphs: bool = True,
        attention: Choice = "auto",
        max_image_tokens: int = 0,
    ) -> None:
        self.shape, self.draft = shape, draft
        self._device = torch.device(device)
        self._primed = [False] * shape.num_slots
        self.images: ImageRows | None = None
        if max_image_tokens:
            assert isinstance(target, ImageEncoder)
            self.images = ImageRows(target, max_tokens=max_image_tokens, device=device)
        if draft is not None:
            target.set_eagle3_layers_to_capture(draft.boundaries)
        self.target_pool = self._pool(target, dtype)
        self.draft_pool = None if draft is None else self._pool(draft, draft_dtype)
        self.state = SlotState(
            num_slots=shape.num_slots + 1,
            max_pages=shape.max_pages,
            vocab_size=target.vocab_size,
            draft_hidden_size=1 if draft is None else draft.hidden_size,
            draft_dtype=draft_dtype,
            topk=shape.tree.topk,
            device=device,
        )
        chosen = choose_backend(attention, target.kv_layout, dtype, self._device)
        self.backends = [chosen.name]  # of the target's attention, and of the draft's
        any_length = chosen.any_length
        self.proposer = None
        if draft is not None and self.draft_pool is not None:
            of_draft = choose_backend(attention, draft.kv_layout, draft_dtype, self._device)
            any_length &= of_draft.any_length
            self.backends.append(of_draft.name)
            backend = of_draft.make(self.draft_pool)
            self.proposer = Proposer(draft, backend, self.state, num_pages=shape.num_pages)
        self.runner = RoundRunner(
            target=target,
            backend=chosen.make(self.target_pool),
            state=self.state,
            proposer=self.proposer,
            simulated=None
            if simulate_acceptance is None
            else SimulatedAcceptance(simulate_acceptance, device=device),
        )
        self.graphs: RoundGraphs | None = None
        if cuda_graphs and self._device.type == "cuda":
            self.graphs = self._make_graphs(any_length)

    def _make_graphs(self, any_length: bool) -> RoundGraphs:
        return RoundGraphs(
            self.runner,
            num_slots=self.shape.num_slots,
            max_kv_len=self.shape.max_pages * self.shape.page_size,
            any_length=any_length,
            mixes_noise=kernels.has_triton(self._device),
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

    @torch.inference_mode()
    def admit(
        self, slot: int, settings: SlotSettings, *, pages: Sequence[int], num_cached: int
    ) -> None:
        """A request enters a slot; its first num_cached tokens are in cached pages already."""
        tokens = [*settings.prompt_token_ids, *settings.output_token_ids]
        self.state.admit(slot, settings)
        self.state.set_pages({slot: pages})
        if self.draft is not None:
            self.draft.bind(slot, tokens)
        if self.proposer is not None and num_cached:
            row = self._on_device((slot, tokens[num_cached], num_cached - 1))
            self.proposer.continue_from_page(row[:1], row[1:2], row[2:])

    @torch.inference_mode()
    def set_pages(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Replace the page tables of slots."""
        self.state.set_pages(pages)

    def release(self, slot: int) -> None:
        """A request leaves its slot; launched rounds still see it, later ones do not."""
        self.state.release(slot)

    @torch.inference_mode()
    def prefill(
        self, chunks: Sequence[PrefillChunk], *, mode: SamplingMode, tree: TreeShape
    ) -> Pending:
        """Launch prompt chunks; one result per chunk (empty where the prompt goes on).

        tree: the shape of the round to follow.
        """
        prime = tree.depth > 0
        self._set_primed([c.slot for c in chunks], prime)
        given = self.images.of(chunks) if self.images is not None else None
        return Pending(self.runner.prefill(chunks, mode=mode, prime=prime, given=given))

    @torch.inference_mode()
    def round(
        self, slots: Sequence[int], *, max_kv_len: int, mode: SamplingMode, tree: TreeShape
    ) -> Pending:
        """Launch one round over the slots; no length of theirs is above max_kv_len.

        tree: any shape within the worker's own (depth, topk and nodes).
        """
        max_kv_len = -(-max_kv_len // KV_LEN_STEP) * KV_LEN_STEP
        if tree.depth and not all(self._primed[slot] for slot in slots):
            assert self.proposer is not None, "a speculative round needs a draft"
            self.proposer.prime(self._on_device(slots), max_kv_len=max_kv_len, mode=mode)
        self._set_primed(slots, tree.depth > 0)
        if self.graphs is not None:
            return Pending(*self.graphs.round(slots, tree, max_kv_len=max_kv_len, mode=mode))
        slots_B = self._on_device(slots)
        return Pending(self.runner.round(slots_B, tree, max_kv_len=max_kv_len, mode=mode))

    @torch.inference_mode()
    def capture(self, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture the usual rounds as graphs ahead of the first request; nothing without graphs."""
        if self.graphs is not None:
            # In one order on all ranks, and what needs the most memory first.
            shapes = dict.fromkeys((self.shape.tree, PLAIN))
            self.graphs.capture(shapes, progress=progress)

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """function(worker, ...): what a rank alone must not do, as its models meet other ranks."""
        return function(self, *args, **kwargs)

    def busy(self) -> AbstractContextManager[None]:
        """Around a turn of the engine, which must not take long."""
        return nullcontext()

    def on_failure(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with a report, in another thread, when another rank fails or hangs."""

    def close(self) -> None:
        """Nothing to end: a lone rank has no others."""

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return self.state.to_device(torch.tensor(numbers))

    def _set_primed(self, slots: Sequence[int], primed: bool) -> None:
        for slot in slots:
            self._primed[slot] = primed
