"""What can be found in the cache is what its key says, whatever requests do (design D7).

Ten thousand random operations on scheduler and allocator, over a model of the pages' content: each
offset holds the tokens up to it, as keys and values depend on them all.
"""

import dataclasses
import random

import pytest

from eyas.cache.pages import OutOfPagesError, PageAllocator
from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.scheduler.scheduler import Phase, Request, Scheduler
from eyas.types import SamplingParams

CACHE_TOKENS, ROUND_TOKENS, GREEDY = 60, 4, SamplingParams(temperature=0)
Content = tuple[int, ...]


@dataclasses.dataclass
class Model:
    """A scheduler that is driven at random, and what its pages hold."""

    page_size: int
    seed: int

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.num_pages = CACHE_TOKENS // self.page_size
        self.allocator = PageAllocator(self.num_pages + NUM_RESERVED_PAGES)
        self.scheduler = Scheduler(
            self.allocator,
            num_slots=4,
            page_size=self.page_size,
            chunk_tokens=7,
            round_tokens=ROUND_TOKENS,
        )
        self.content: dict[tuple[int, int], Content] = {}  # by page and offset
        self.published: dict[bytes, Content] = {}  # what a key stands for
        self.num_requests = self.num_hits = self.num_evicted = self.num_preempted = 0
        publish = self.allocator.publish

        def noting(page: int, key: bytes) -> None:
            whole = self.content[page, self.page_size - 1]
            assert self.published.setdefault(key, whole) == whole
            publish(page, key)

        self.allocator.publish = noting  # type: ignore[method-assign]

    def write(self, request: Request, index: int) -> None:
        """As the device does for a committed token; no one else may hold the page, nor find it."""
        page, offset = request.pages[index // self.page_size], index % self.page_size
        assert self.allocator._holders[page] == 1
        assert page not in self.allocator._key_of
        self.content[page, offset] = tuple(request.token_ids[: index + 1])

    def add(self) -> None:
        """A prompt of few tokens and beginnings; sometimes the continuation of another's text."""
        head = self.random.choice([[], [1] * 9, [2, 1] * 5, *self.texts()])
        tail = [self.random.randrange(3) for _ in range(self.random.randint(1, 6))]
        prompt = [*head, *tail][:40]
        room = CACHE_TOKENS - len(prompt)
        self.scheduler.add(
            Request(
                request_id=str(self.num_requests),
                prompt_token_ids=prompt,
                params=GREEDY,
                seed=0,
                max_new_tokens=min(self.random.randint(1, 20), room),
                arrival=self.num_requests,
            )
        )
        self.num_requests += 1

    def texts(self) -> list[list[int]]:
        return [r.token_ids for r in self.scheduler.admitted]

    def admit(self) -> None:
        for request in self.scheduler.admit():
            self.num_hits += request.num_computed > 0
            for index in range(request.num_computed):
                page = request.pages[index // self.page_size]
                expected = tuple(request.token_ids[: index + 1])
                assert self.content[page, index % self.page_size] == expected

    def prefill(self) -> None:
        """The plan publishes first; the launch follows at once, before anybody can look."""
        publish, later = self.allocator.publish, []
        self.allocator.publish = lambda page, key: later.append((page, key))  # type: ignore
        chunks = self.scheduler.plan_prefill()
        self.allocator.publish = publish  # type: ignore[method-assign]
        for chunk in chunks:
            for index in range(chunk.start, chunk.end):
                self.write(chunk.request, index)
        for page, key in later:
            publish(page, key)
        for chunk in chunks:
            if chunk.is_last:
                self.emit(chunk.request, 1)

    def round(self) -> None:
        """Every running request grows, or somebody is preempted, and commits some tokens."""
        for request in self.scheduler.running:
            while request.phase is Phase.RUNNING:
                try:
                    self.scheduler.grow(request)
                    break
                except OutOfPagesError:
                    self.scheduler.preempt()
                    self.num_preempted += 1
        for request in self.scheduler.running:
            count = min(self.random.randint(1, ROUND_TOKENS), request.num_remaining)
            committed = request.num_tokens - 1
            self.emit(request, count, committed=committed)

    def emit(self, request: Request, count: int, *, committed: int | None = None) -> None:
        request.output_token_ids += [self.random.randrange(3) for _ in range(count)]
        if committed is not None:
            for index in range(committed, request.num_tokens - 1):
                self.write(request, index)
        self.scheduler.publish(request)
        if not request.num_remaining:
            self.scheduler.finish(request)

    def end(self) -> None:
        """An abort, wherever the request is."""
        known = [*self.scheduler.waiting, *self.scheduler.admitted]
        if known:
            self.scheduler.finish(self.random.choice(known))

    def check(self) -> None:
        """No page is lost, and each page that can be found has the content of its key."""
        allocator = self.allocator
        held = {page for r in self.scheduler.admitted for page in r.pages}
        assert set(allocator._holders) == held
        assert allocator.num_free == self.num_pages - len(held)
        assert not set(allocator._free) & set(allocator._idle)
        assert not held & {*allocator._free, *allocator._idle}
        for key, page in allocator._page_of.items():
            assert self.content[page, self.page_size - 1] == self.published[key]
        self.num_evicted = len(self.published) - len(allocator._page_of)


@pytest.mark.parametrize(("page_size", "seed"), [(1, 0), (2, 1), (3, 2), (5, 3)])
def test_ten_thousand_operations(page_size: int, seed: int) -> None:
    """Four page sizes with 2,500 operations each."""
    model = Model(page_size, seed)
    for _ in range(2500):
        operations = [model.add, model.admit, model.prefill, model.round, model.round, model.end]
        if len(model.scheduler.waiting) > 5:
            operations.remove(model.add)
        model.random.choice(operations)()
        model.check()
    assert model.num_requests > 150
    assert model.num_hits > 30 and model.num_evicted > 30 and model.num_preempted > 5
    for request in [*model.scheduler.waiting, *model.scheduler.admitted]:
        model.scheduler.finish(request)
    model.check()
    assert model.allocator.num_free == model.num_pages and not model.scheduler.has_work
