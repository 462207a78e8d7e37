"""The page allocator against a brute-force oracle: a plain list of what each page is."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eyas.cache.pages import OutOfPagesError, PageAllocator, chain_key
from eyas.cache.pool import NUM_RESERVED_PAGES

NUM_PAGES = 9


@dataclasses.dataclass
class OraclePage:
    """holders: requests with it in their table. key: what it can be found under. left: when it
    was last let go, for the order in which contents are given up."""

    holders: int = 0
    key: bytes | None = None
    left: int = 0


class AllocatorMachine(RuleBasedStateMachine):
    """Random allocations, matches, publications and releases, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.oracle = {page: OraclePage() for page in range(NUM_RESERVED_PAGES, NUM_PAGES)}
        self.tables: list[list[int]] = []
        self.clock = 0

    def found(self, key: bytes) -> int | None:
        """The page that the oracle would find."""
        return next((page for page, o in self.oracle.items() if o.key == key), None)

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        free = [page for page, o in self.oracle.items() if not o.holders]
        if count > len(free):
            with pytest.raises(OutOfPagesError, match=f"{count} pages asked for, {len(free)} free"):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert len(set(pages)) == count and set(pages) <= set(free)
        # Empty pages go first, then the contents which were let go longest ago.
        kept = [self.oracle[p].left for p in set(free) - set(pages) if self.oracle[p].key]
        lost = [self.oracle[page].left for page in pages if self.oracle[page].key]
        if lost:
            assert all(self.oracle[p].key for p in set(free) - set(pages))
            assert not kept or max(lost) < min(kept)
        for page in pages:
            self.oracle[page] = OraclePage(holders=1)
        self.tables.append(pages)

    @rule(length=st.integers(0, 4), branch=st.integers(0, 1))
    def match(self, length: int, branch: int) -> None:
        keys = self.keys(length, branch)
        expected = []
        for key in keys:
            page = self.found(key)
            if page is None:
                break
            expected.append(page)
        assert self.allocator.match(keys) == expected
        for page in expected:
            self.oracle[page].holders += 1
        self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), branch=st.integers(0, 1))
    def publish(self, data: st.DataObject, branch: int) -> None:
        """A table's pages, first to last, under a chain; a twin of what is known stays unknown."""
        table = data.draw(st.sampled_from(self.tables))
        for page, key in zip(table, self.keys(len(table), branch), strict=True):
            self.allocator.publish(page, key)
            if self.found(key) is None and self.oracle[page].key is None:
                self.oracle[page].key = key

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables.pop(number)
        self.allocator.release(table)
        for page in reversed(table):
            self.clock += 1
            self.oracle[page].holders -= 1
            self.oracle[page].left = self.clock

    @staticmethod
    def keys(count: int, branch: int) -> list[bytes]:
        """Two chains which part after their first page."""
        keys = [chain_key(b"", [7, 7])]
        for number in range(1, count):
            keys.append(chain_key(keys[-1], [number, branch]))
        return keys[:count]

    @invariant()
    def nothing_is_lost(self) -> None:
        free = sum(not o.holders for o in self.oracle.values())
        assert self.allocator.num_free == free
        assert self.allocator.num_usable == NUM_PAGES - NUM_RESERVED_PAGES

    def teardown(self) -> None:
        for table in self.tables:
            self.allocator.release(table)
        assert self.allocator.num_free == NUM_PAGES - NUM_RESERVED_PAGES


AllocatorMachine.TestCase.settings = settings(
    derandomize=True, deadline=None, max_examples=60, stateful_step_count=40
)
TestAllocator = AllocatorMachine.TestCase


def test_reserved_pages_are_never_handed_out() -> None:
    assert sorted(PageAllocator(6).allocate(4)) == [2, 3, 4, 5]


def test_a_page_that_is_not_held_cannot_be_released_or_published() -> None:
    allocator = PageAllocator(6)
    (page,) = allocator.allocate(1)
    allocator.release([page])
    with pytest.raises(AssertionError, match="not held"):
        allocator.release([page])
    with pytest.raises(AssertionError, match="not held"):
        allocator.publish(page, b"key")


def test_a_chain_loses_its_tail_first() -> None:
    """A page is of no use without those before it."""
    allocator = PageAllocator(5)
    pages, keys = allocator.allocate(3), [b"a", b"b", b"c"]
    for page, key in zip(pages, keys, strict=True):
        allocator.publish(page, key)
    allocator.release(pages)
    allocator.release(allocator.allocate(1))
    assert allocator.match(keys) == pages[:2]


def test_keys_tell_texts_and_their_beginnings_apart() -> None:
    texts = [[1, 2], [2, 1], [1, 2**40], [-1, 2], [258], [1, 2, 0]]
    first = {chain_key(b"", text) for text in texts}
    assert len(first) == len(texts)
    second = {chain_key(parent, [5, 6]) for parent in first}
    assert len(second) == len(texts) and not first & second
    assert chain_key(b"", [1, 2]) == chain_key(b"", (1, 2))
