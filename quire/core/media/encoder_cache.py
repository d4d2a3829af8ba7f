"""Encoder cache: where the device has the rows that an encoder made of media items, by digest.

Rows are in pages of PAGE_ROWS rows, so that no place is too small for an item while enough pages
are free. An item stays until its pages are needed: items that no request refers to go first, of
these the one used longest ago. Steps run in order, so the pages of an item may be given away while
steps in flight still read them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container

from quire.config.memory.part_facts import PAGE_ROWS


def pages_for(rows: int) -> int:
    """Return the number of pages that so many rows fill."""
    return -(-rows // PAGE_ROWS)


class EncoderCache:
    """Of one data-parallel rank. References count whether the item is cached or not."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, num_pages
        self.num_pages = num_pages
        self.evictions = 0
        self._free = list(range(num_pages))[::-1]
        self._pages: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()  # the oldest use first
        self._references: Counter[bytes] = Counter()
        self._referenced_pages = 0  # of items that are cached

    def __contains__(self, digest: object) -> bool:
        return digest in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def used_pages(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def referenced_pages(self) -> int:
        """Pages of items that requests refer to."""
        return self._referenced_pages

    def is_referenced(self, digest: bytes) -> bool:
        return digest in self._references

    def pages(self, digest: bytes) -> tuple[int, ...]:
        """Return the pages of a cached item, in the order of its rows."""
        return self._pages[digest]

    def add_reference(self, digest: bytes) -> None:
        """Keep the item as long as others can go. Each call needs one of remove_reference()."""
        self._references[digest] += 1
        if self._references[digest] == 1:
            self._referenced_pages += len(self._pages.get(digest, ()))

    def remove_reference(self, digest: bytes) -> None:
        self._references[digest] -= 1
        if not self._references[digest]:
            del self._references[digest]
            self._referenced_pages -= len(self._pages.get(digest, ()))

    def touch(self, digest: bytes) -> None:
        """Count a use of a cached item."""
        self._pages.move_to_end(digest)

    def store(self, digest: bytes, rows: int, kept: Container[bytes]) -> tuple[int, ...]:
        """Return pages for an item that is not cached, and evict others where they lack.

        kept: items that stay; with them it fits.
        """
        assert digest not in self._pages, "an item is cached once"
        needed = pages_for(rows)
        while len(self._free) < needed:
            self._evict(kept)
        taken = tuple([self._free.pop() for _ in range(needed)])
        self._pages[digest] = taken
        if digest in self._references:
            self._referenced_pages += needed
        return taken

    def _evict(self, kept: Container[bytes]) -> None:
        others = (one for one in self._pages if one not in kept)
        digest = first = next(others)
        if first in self._references:
            digest = next((one for one in others if one not in self._references), first)
        pages = self._pages.pop(digest)
        self._free += pages[::-1]
        self.evictions += 1
        if digest in self._references:
            self._referenced_pages -= len(pages)

    def clear(self) -> None:
        """Forget all items: what the device has of them is lost. References stay."""
        self._pages.clear()
        self._free = list(range(self.num_pages))[::-1]
        self._referenced_pages = 0

    def check(self) -> None:
        """Raise AssertionError if a page is lost, or has two owners."""
        owned = [page for pages in self._pages.values() for page in pages]
        assert sorted([*owned, *self._free]) == list(range(self.num_pages)), "a page is lost"
        referenced = [len(p) for one, p in self._pages.items() if one in self._references]
        assert self._referenced_pages == sum(referenced), "references are miscounted"
        assert min(self._references.values(), default=1) > 0, "a reference was removed twice"
