"""The scheduler alone: order, budgets, pages for what may come, and preemption.

tests/engine/test_engine.py runs it within the loop, over random requests.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.cache.pages import OutOfPagesError, PageAllocator
from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.scheduler.scheduler import Phase, Request, Scheduler
from eyas.types import SamplingParams

GREEDY = SamplingParams(temperature=0)


def request(number: int, num_prompt: int, max_new: int = 10, *, token: int = 0) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=[token] * num_prompt,
        params=GREEDY,
        seed=0,
        max_new_tokens=max_new,
        arrival=number,
    )


def scheduler(num_pages: int = 20, **changes: int) -> Scheduler:
    arguments = {"num_slots": 3, "page_size": 4, "chunk_tokens": 8, "round_tokens": 4}
    return Scheduler(PageAllocator(num_pages + NUM_RESERVED_PAGES), **(arguments | changes))


def spans(made: Scheduler) -> list[tuple[str, int, int]]:
    return [(c.request.request_id, c.start, c.end) for c in made.plan_prefill()]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    num_slots=st.integers(1, 4),
    chunk_tokens=st.integers(1, 20),
    page_size=st.integers(1, 9),
)
def test_prefill_covers_every_prompt_once_within_its_budget(
    lengths: list[int], num_slots: int, chunk_tokens: int, page_size: int
) -> None:
    """The oracle: all tokens in order of arrival, handed out chunk_tokens at a time, but none of
    a request that has no slot yet; slots are never freed here."""
    made = scheduler(400, num_slots=num_slots, chunk_tokens=chunk_tokens, page_size=page_size)
    for number, length in enumerate(lengths):
        made.add(request(number, length, token=number))
    assert [r.request_id for r in made.admit()] == [
        str(n) for n in range(min(num_slots, len(lengths)))
    ]
    tokens = [(str(n), i) for n, length in enumerate(lengths[:num_slots]) for i in range(length)]
    while tokens:
        turn, tokens = tokens[:chunk_tokens], tokens[chunk_tokens:]
        chunks = made.plan_prefill()
        assert [(c.request.request_id, i) for c in chunks for i in range(c.start, c.end)] == turn
        left = {number for number, _ in tokens}
        for chunk in chunks:
            ended = chunk.request.request_id not in left
            assert chunk.is_last == ended == (chunk.request.phase is Phase.RUNNING)
    assert made.plan_prefill() == []
    assert made.running == made.admitted


def test_admission_stops_at_the_first_that_does_not_fit() -> None:
    """A small request behind a large one does not overtake it, or the large one would starve."""
    made = scheduler(num_pages=6)
    made.add(request(0, 8))  # nine indices with the first sampled token's: three pages
    made.add(request(1, 16))
    made.add(request(2, 1))
    assert [r.request_id for r in made.admit()] == ["0"]
    assert made.admit() == [] and [r.request_id for r in made.waiting] == ["1", "2"]
    made.finish(made.admitted[0])
    assert [r.request_id for r in made.admit()] == ["1", "2"]
    assert len(made.admitted[0].pages) == 5 and len(made.admitted[1].pages) == 1


def test_an_admission_that_fails_holds_nothing() -> None:
    """Not even the cached pages that it found."""
    made = scheduler(num_pages=4, round_tokens=1)
    made.add(first := request(0, 9))
    made.admit()
    made.plan_prefill()
    made.plan_prefill()  # two full pages are published
    made.add(request(1, 14))  # finds two pages, needs two more, and one is free
    assert made.admit() == []
    assert made.allocator.num_free == 1
    made.finish(first)
    (second,) = made.admit()
    assert second.num_cached_tokens == 8 and spans(made) == [("1", 8, 14)]
    made.finish(second)
    assert made.allocator.num_free == 4


@pytest.mark.parametrize("num_unread", [0, 1, 2])
def test_pages_are_kept_for_all_that_may_come(num_unread: int) -> None:
    """Every unread launch and the next one may emit round_tokens each; never more than the end."""
    for max_new in range(1, 30):
        made = scheduler(round_tokens=4, page_size=3)
        made.add(one := request(0, 5, max_new))
        made.admit()
        made.plan_prefill()
        one.num_unread = num_unread
        one.output_token_ids = [1]
        made.grow(one)
        # Cache indices 0 .. n - 1, n tokens in all, the pending one included.
        most = min(6 + 4 * (num_unread + 1), 5 + max_new)
        assert len(one.pages) == max(-(-most // 3), 2)
        assert not made.grow(one)  # and they are enough


def test_growing_takes_all_or_nothing() -> None:
    made = scheduler(num_pages=4, round_tokens=20)
    made.add(one := request(0, 8, 100))
    made.admit()
    made.plan_prefill()
    held = list(one.pages)
    with pytest.raises(OutOfPagesError):
        made.grow(one)
    assert one.pages == held and made.allocator.num_free == 1


def test_the_latest_is_preempted_and_comes_first_again() -> None:
    made = scheduler()
    for number in range(4):
        made.add(request(number, 5, token=number))
    made.admit()
    made.plan_prefill()
    made.admitted[-1].num_unread = 2
    victim = made.preempt()
    assert victim.request_id == "2" and victim.phase is Phase.WAITING
    assert (victim.pages, victim.slot, victim.num_unread) == ([], None, 0)
    assert [r.request_id for r in made.waiting] == ["2", "3"]
    assert [r.request_id for r in made.admit()] == ["2"]


def test_a_preempted_request_computes_its_output_again() -> None:
    made = scheduler(prefix_caching=False)
    made.add(one := request(0, 5))
    made.admit()
    made.plan_prefill()
    one.output_token_ids = [7, 8]
    made.preempt()
    made.admit()
    (chunk,) = made.plan_prefill()
    assert (chunk.start, chunk.end, chunk.is_last) == (0, 7, True)
    assert one.token_ids == [0] * 5 + [7, 8] and one.num_remaining == 8
    assert len(one.pages) == 2


def test_a_preempted_request_finds_its_own_pages() -> None:
    """But counts them as no saving: it was not spared anything that others pay."""
    made = scheduler()
    made.add(one := request(0, 5))
    made.admit()
    made.plan_prefill()
    one.output_token_ids = [7, 8, 9, 6]  # the last one is pending
    made.publish(one)
    made.preempt()
    made.admit()
    assert one.num_cached_tokens == 0
    assert spans(made) == [("0", 8, 9)]


@pytest.mark.parametrize(
    ("num_prompt", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_a_prefix_hit_leaves_a_token_to_compute(num_prompt: int, expected: int) -> None:
    """The answer's first token needs the last prompt token's row, so a page can be too many."""
    made = scheduler(chunk_tokens=50)
    made.add(request(0, 20))
    made.admit()
    made.plan_prefill()
    made.add(one := request(1, num_prompt))
    made.admit()
    assert one.num_cached_tokens == expected
    assert spans(made) == [("1", expected, num_prompt)]
    first = made.admitted[0]
    assert one.pages[: expected // 4] == first.pages[: expected // 4]
    assert not set(one.pages[expected // 4 :]) & set(first.pages)


def test_only_full_and_committed_pages_are_published() -> None:
    """The pending token is emitted, but its keys are not in the cache yet."""
    made = scheduler()
    made.add(one := request(0, 3))
    made.admit()
    made.plan_prefill()
    for num_output, num_full in ((1, 0), (2, 1), (5, 1), (6, 2)):
        made.grow(one)
        one.output_token_ids = list(range(num_output))
        made.publish(one)
        keys = made._keys(one, num_full)
        assert one.num_published == num_full
        found = made.allocator.match(keys)
        assert found == one.pages[:num_full]
        made.allocator.release(found)


def test_without_prefix_caching_nothing_is_shared() -> None:
    made = scheduler(prefix_caching=False)
    for number in range(2):
        made.add(request(number, 8))
        made.admit()
        made.plan_prefill()
    assert made.admitted[1].num_cached_tokens == 0
    assert not set(made.admitted[0].pages) & set(made.admitted[1].pages)


def test_finishing_works_everywhere_and_once() -> None:
    made = scheduler(num_slots=2)
    for number in range(3):
        made.add(request(number, 20, token=number))
    made.admit()
    made.plan_prefill()
    waiting, prefilling = made.waiting[0], made.admitted[1]
    for one in (waiting, prefilling, prefilling, made.admitted[0]):
        made.finish(one)
    assert not made.has_work
    assert made.allocator.num_free == made.allocator.num_usable == 20
    assert sorted(made._free_slots) == [0, 1]
