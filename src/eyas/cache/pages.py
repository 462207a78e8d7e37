"""The page allocator: which pages are free and how many requests hold each of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from eyas.cache.pool import NUM_RESERVED_PAGES


class OutOfPagesError(Exception):
    """Not enough free pages; the scheduler preempts or waits."""


class PageAllocator:
    """Hands out page ids NUM_RESERVED_PAGES .. num_pages - 1, each held by one request."""

    def __init__(self, num_pages: int) -> None:
        self._free = deque(range(NUM_RESERVED_PAGES, num_pages))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All pages but the reserved ones."""
        return len(self._free) + len(self._held)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. Raises OutOfPagesError and takes none if fewer are free."""
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages asked for, {len(self._free)} free")
        pages = [self._free.popleft() for _ in range(count)]
        self._held.update(pages)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back. A page that is not held is a bug (AssertionError)."""
        for page in pages:
            assert page in self._held, f"page {page} is not held"
            self._held.remove(page)
            self._free.append(page)
