"""Encoder slices: the encoder's work on items, divided over steps that have decoding rows.

Next tokens of those wait for what a step encodes. So beside them a step runs a slice only: some
blocks of the encoder, of one item or of a few small ones. Items that rows were refused for are
wanted; those of the first one run, slice by slice, until all have rows in the cache. A prompt that
takes them continues with the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from quire.core.media.encoder_cache import EncoderCache, pages_for
from quire.core.types import MediaItem, MediaTensor

GIVEN_ROWS = "embeds"
"""Name of the only tensor of an item that brings its rows itself."""


class SliceSizes(NamedTuple):
    """How the encoder's work beside decoding rows is divided."""

    blocks: int  # that the encoder can be divided into, at most
    rows: int
    """Rows whose whole encoding takes about as long as a slice: if it is 64, a step runs a quarter
    of the blocks for an item of 256."""
    whole_rows: int = 0  # an item that has no more is not divided


class EncodedItem(NamedTuple):
    """An item that a step encodes, and the pages that get its rows."""

    item: MediaItem
    pages: tuple[int, ...]


class EncoderSlice(NamedTuple):
    """A slice of the encoder's work on items. The last one makes their rows."""

    encodes: tuple[EncodedItem, ...]  # without pages before the last slice
    blocks: tuple[int, int]  # [first, last) of those that the encoder can be divided into
    ends: bool


class EncoderSlices:
    """Of one rank, whose cache gets the rows."""

    def __init__(self, sizes: SliceSizes, cache: EncoderCache) -> None:
        assert sizes.blocks > 0, sizes
        self.wanted: dict[bytes, MediaItem] = {}  # by rows that this step refuses
        self._sizes, self._cache = sizes, cache
        self._items: tuple[MediaItem, ...] = ()  # that are being encoded
        self._done = 0  # blocks of them
        self._unused: set[bytes] = set()  # that were encoded so, and have had no use

    def want(self, item: MediaItem) -> bool:
        """Whether a row has to wait for an item; it will be encoded then.

        One that is cached or is not divided is not waited for, and neither is one without space
        beside those that requests refer to: a step that needs it makes space.
        """
        is_made = item.digest in self._cache or brings_rows(item.tensors)
        is_whole = item.num_rows <= self._sizes.whole_rows
        if is_made or is_whole or not self._has_space((item,)):
            return False
        self.wanted[item.digest] = item
        return True

    def advance(self, decoding: int, users: Collection[bytes]) -> EncoderSlice | None:
        """Return the slice of a step, if it has decoding rows and there is something to encode.

        users: items of the step's rows, which stay in the cache.
        """
        if not decoding:
            return None
        rows = self._sizes.rows * max(1, len(self.wanted) // decoding)
        if any(item.digest in self._cache for item in self._items):
            self._items = ()  # a step without decoding rows was quicker
        if not self._items:
            self._items, self._done = self._choose(rows), 0
        if not self._items:
            return None
        total = sum([item.num_rows for item in self._items])
        first = self._done
        blocks = self._sizes.blocks
        last = self._done = min(first + max(1, blocks * rows // total), blocks)
        if last < blocks:
            encodes = [EncodedItem(item, ()) for item in self._items]
            return EncoderSlice(tuple(encodes), (first, last), False)
        items, self._items = self._items, ()
        if not self._has_space(items, users):
            return None
        self._unused = {one for one in self._unused if one in self._cache}
        self._unused |= {item.digest for item in items}
        encodes = [
            EncodedItem(item, self._cache.store(item.digest, item.num_rows, users))
            for item in items
        ]
        return EncoderSlice(tuple(encodes), (first, last), True)

    def take_unused(self, digests: Iterable[bytes]) -> set[bytes]:
        """Return those among the digests that had no use since they were encoded."""
        found = self._unused.intersection(digests)
        self._unused -= found
        return found

    def forget(self) -> None:
        """Drop what is being encoded: what the device has of it is lost."""
        self._items = ()
        self.wanted.clear()
        self._unused.clear()

    def _choose(self, rows: int) -> tuple[MediaItem, ...]:
        """The first item that is wanted, and more while all have so many rows."""
        chosen: list[MediaItem] = []
        for item in self.wanted.values():
            rows -= item.num_rows
            if chosen and (rows < 0 or not self._has_space((*chosen, item))):
                break
            chosen.append(item)
        return tuple(chosen)

    def _has_space(self, items: Iterable[MediaItem], users: Iterable[bytes] = ()) -> bool:
        """Whether items fit beside those that requests refer to, and beside users."""
        cache = self._cache
        pages = cache.referenced_pages + sum([pages_for(item.num_rows) for item in items])
        others = [one for one in users if one in cache and not cache.is_referenced(one)]
        return pages + sum([len(cache.pages(one)) for one in others]) <= cache.num_pages


def brings_rows(tensors: Sequence[MediaTensor]) -> bool:
    """Whether an item with these tensors has its rows, which nothing has to encode."""
    return len(tensors) == 1 and tensors[0].name == GIVEN_ROWS
