"""Admission, chunked prefill, page growth and preemption.

The scheduler knows lengths only as far as the host has read them. `num_unread` of a request
counts rounds that were launched and not read yet; each may add up to `round_tokens` tokens, and
pages are kept for all of them and one round more (design D6).
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque

from eyas.cache.pages import OutOfPagesError, PageAllocator
from eyas.types import SamplingParams


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence. max_new_tokens: from params and the model length together, at least 1.

    arrival: order of priority (lower first). num_rounds, num_round_tokens: see RequestOutput.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    arrival: int
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    phase: Phase = Phase.WAITING
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_unread: int = 0
    num_rounds: int = 0
    num_round_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output: what a (resumed) prefill runs over."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_remaining(self) -> int:
        """New tokens that may still come."""
        return self.max_new_tokens - len(self.output_token_ids)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Positions start .. end - 1 of a request's tokens, to prefill now."""

    request: Request
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the chunk ends the prompt (and so samples a token)."""
        return self.end == self.request.num_tokens


class Scheduler:
    """Decides; the engine carries out. First come, first served; the latest is preempted first."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        num_slots: int,
        page_size: int,
        chunk_tokens: int,
        round_tokens: int,
    ) -> None:
        self.allocator = allocator
        self._page_size, self._chunk_tokens = page_size, chunk_tokens
        self._round_tokens = round_tokens
        self._free_slots = list(reversed(range(num_slots)))
        self.waiting: deque[Request] = deque()
        self.admitted: list[Request] = []  # in prefill or running, by arrival

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or admitted."""
        return bool(self.waiting or self.admitted)

    @property
    def running(self) -> list[Request]:
        """Requests whose prompt is done, by arrival."""
        return [r for r in self.admitted if r.phase is Phase.RUNNING]

    def num_pages(self, num_indices: int) -> int:
        """Pages that hold cache indices 0 .. num_indices - 1."""
        return -(-num_indices // self._page_size)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Give slots and prompt pages to waiting requests, in order, while both last."""
        admitted = []
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            try:
                # The draft's entry of the first sampled token is at index num_tokens.
                request.pages = self.allocator.allocate(self.num_pages(request.num_tokens + 1))
            except OutOfPagesError:
                break
            self.waiting.popleft()
            request.slot = self._free_slots.pop()
            request.phase = Phase.PREFILL
            request.num_computed = 0
            self.admitted.append(request)
            admitted.append(request)
        self.admitted.sort(key=lambda r: r.arrival)
        return admitted

    def plan_prefill(self) -> list[Chunk]:
        """Chunks within the token budget, first come first; marks them as computed."""
        chunks, budget = [], self._chunk_tokens
        for request in self.admitted:
            if request.phase is not Phase.PREFILL or budget == 0:
                continue
            start = request.num_computed
            end = min(request.num_tokens, start + budget)
            budget -= end - start
            request.num_computed = end
            chunks.append(Chunk(request, start, end))
            if end == request.num_tokens:
                request.phase = Phase.RUNNING
        return chunks

    def grow(self, request: Request) -> bool:
        """Make sure that the next round fits; True if the page table changed.

        Raises OutOfPagesError and changes nothing if there are not enough pages.
        """
        most_tokens = len(request.prompt_token_ids) + request.max_new_tokens
        bound = request.num_tokens + (request.num_unread + 1) * self._round_tokens
        needed = self.num_pages(min(bound, most_tokens)) - len(request.pages)
        if needed <= 0:
            return False
        request.pages += self.allocator.allocate(needed)
        return True

    def preempt(self) -> Request:
        """Send the latest request back to the queue; its tokens are computed again later."""
        victim = self.admitted[-1]
        self._vacate(victim)
        victim.phase = Phase.WAITING
        self.waiting.appendleft(victim)
        return victim

    def finish(self, request: Request) -> None:
        """Free what a request holds, wherever it is. Finishing twice changes nothing."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.phase is not Phase.FINISHED:
            self._vacate(request)
        request.phase = Phase.FINISHED

    def _vacate(self, request: Request) -> None:
        assert request.slot is not None
        self.admitted.remove(request)
        self.allocator.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages, request.slot, request.num_unread = [], None, 0
