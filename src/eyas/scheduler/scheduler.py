"""Admission, chunked prefill, page growth and preemption.

The scheduler knows lengths only as far as the host has read them. `num_unread` of a request
counts rounds that were launched and not read yet; each may add up to `round_tokens` tokens, and
pages are kept for all of them and one round more (design D6).
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Sequence

from eyas.cache.pages import OutOfPagesError, PageAllocator, chain_key
from eyas.types import ImageInput, SamplingParams


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence. max_new_tokens: from params and the model length together, at least 1.
    images: in the order of their places.

    arrival: order of priority (lower first). num_computed: tokens whose prefill was launched or
    found in the cache. num_published: pages that others can find. num_rounds, num_round_tokens,
    num_cached_tokens, accepted_counts: see RequestOutput.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    arrival: int
    images: Sequence[ImageInput] = ()
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    phase: Phase = Phase.WAITING
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_unread: int = 0
    num_rounds: int = 0
    num_round_tokens: int = 0
    num_cached_tokens: int = 0
    accepted_counts: list[int] = dataclasses.field(default_factory=list)
    num_published: int = 0
    page_keys: list[bytes] = dataclasses.field(default_factory=list)

    def count_round(self, *, num_accepted: int, num_tokens: int) -> None:
        """A round was read that accepted this many drafted tokens and emitted num_tokens."""
        self.num_rounds += 1
        self.num_round_tokens += num_tokens
        num_accepted = min(num_accepted, num_tokens)  # a stop may have cut some of them
        missing = num_accepted + 1 - len(self.accepted_counts)
        self.accepted_counts += [0] * missing
        self.accepted_counts[num_accepted] += 1

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output: what a (resumed) prefill runs over."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def images_within(self, start: int, end: int) -> list[ImageInput]:
        """Images with a token at a position start .. end - 1."""
        return [image for image in self.images if image.start < end and image.end > start]

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
        prefix_caching: bool = True,
    ) -> None:
        self.allocator = allocator
        self._page_size, self._chunk_tokens = page_size, chunk_tokens
        self._round_tokens, self._prefix_caching = round_tokens, prefix_caching
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
            cached = self._match(request)
            # The draft's entry of the first sampled token is at index num_tokens.
            needed = self.num_pages(request.num_tokens + 1) - len(cached)
            try:
                request.pages = cached + self.allocator.allocate(needed)
            except OutOfPagesError:
                self.allocator.release(cached)
                break
            request.num_computed = len(cached) * self._page_size
            request.num_published = len(cached)
            if not request.output_token_ids:  # what a preempted request finds again is no saving
                request.num_cached_tokens = request.num_computed
            self.waiting.popleft()
            request.slot = self._free_slots.pop()
            request.phase = Phase.PREFILL
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
            self._publish(request, end)
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

    def publish(self, request: Request) -> None:
        """Let others find the pages that the tokens read so far have filled.

        The last token read is pending: its keys are not committed yet.
        """
        if request.phase is Phase.RUNNING:
            self._publish(request, request.num_tokens - 1)

    def _publish(self, request: Request, num_committed: int) -> None:
        num_full = num_committed // self._page_size
        if not self._prefix_caching or num_full <= request.num_published:
            return
        keys = self._keys(request, num_full)
        for number in range(request.num_published, num_full):
            self.allocator.publish(request.pages[number], keys[number])
        request.num_published = num_full

    def _match(self, request: Request) -> list[int]:
        """Cached pages of the request's prefix; at least one token is left to compute."""
        if not self._prefix_caching:
            return []
        return self.allocator.match(
            self._keys(request, (request.num_tokens - 1) // self._page_size)
        )

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """Keys of the first `count` pages, which must be full."""
        keys, size = request.page_keys, self._page_size
        if len(keys) < count:
            tokens = request.token_ids
            for start in range(len(keys) * size, count * size, size):
                parent, end = keys[-1] if keys else b"", start + size
                content = b"".join(
                    image.start.to_bytes(8, "big") + image.digest
                    for image in request.images_within(start, end)
                )
                keys.append(chain_key(parent, tokens[start:end], content))
        return keys[:count]

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
        request.pages, request.slot = [], None
        request.num_unread = request.num_published = 0
