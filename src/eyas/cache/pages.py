"""The page allocator: who holds which page, and which full pages can be found again by content.

A full page whose tokens are committed may be published under a key, a chain hash of all tokens up
to its end (design D7). A published page that nobody holds keeps its content until it is needed
for something else, the least recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from eyas.cache.pool import NUM_RESERVED_PAGES


class OutOfPagesError(Exception):
    """Not enough free pages; the scheduler preempts or waits."""


def chain_key(parent: bytes, token_ids: Sequence[int], content: bytes = b"") -> bytes:
    """The key of a page: a digest of its parent's key (empty for the first), its tokens, and the
    content that some of them only stand for (images)."""
    tokens = array("q", token_ids).tobytes()
    return hashlib.blake2b(parent + tokens + content, digest_size=16).digest()


class PageAllocator:
    """Hands out page ids NUM_RESERVED_PAGES .. num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        self._free = deque(range(NUM_RESERVED_PAGES, num_pages))
        self._holders: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, not held, oldest first

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now; those kept only for their content are among them."""
        return len(self._free) + len(self._idle)

    @property
    def num_usable(self) -> int:
        """All pages but the reserved ones."""
        return self.num_free + len(self._holders)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. Raises OutOfPagesError and takes none if fewer are free."""
        if count > self.num_free:
            raise OutOfPagesError(f"{count} pages asked for, {self.num_free} free")
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. A page that is not held is a bug (AssertionError)."""
        for page in reversed(pages):  # a chain's tail is useless without its head: evict it first
            assert page in self._holders, f"page {page} is not held"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Take the pages of the longest published prefix of `keys`; release them as any other."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
            pages.append(page)
        return pages

    def publish(self, page: int, key: bytes) -> None:
        """Let a held page be found under `key`. Of two pages with the same content one is kept."""
        assert page in self._holders, f"page {page} is not held"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
