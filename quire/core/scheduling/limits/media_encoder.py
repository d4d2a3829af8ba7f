"""Media encoder limit: bounds what the encoder of images, video and audio does in one step.

An item is encoded whole, by the first step that computes a position which takes one of its rows,
or in slices by steps before that (quire.core.media.encoder_slices). Its rows stay in the encoder
cache of the sequence's data-parallel rank. A row of the step ends before the first position whose
item is neither cached nor fits: into the step's budget, or into the cache beside the other items of
the step. The first item of a step always fits.

A request refers to its items until one of its sequences has computed past them. Items that are
referred to are evicted for the first item of a step only: so each step makes progress whatever is
in the cache, and items that others still need are seldom encoded twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from quire.config.memory.part_facts import PAGE_ROWS
from quire.core.media.encoder_cache import EncoderCache, pages_for
from quire.core.media.encoder_slices import EncodedItem, EncoderSlice, EncoderSlices, SliceSizes
from quire.core.media.item_rows import check_items, check_rope_positions, first_row_position
from quire.core.scheduling.limits.base import NO_BOUND, Admission, StepBudget, StepListener
from quire.core.snapshot import MediaStats
from quire.core.types import MediaItem, Request, Sequence
from quire.errors import TooLong, Unsupported

BESIDE_ROWS = 512
"""Rows that an undivided step encodes beside decoding rows, if one item has no more."""


class MediaStep(NamedTuple):
    """Of one data-parallel rank's step: the items to encode, and where those of its rows are."""

    encodes: tuple[EncodedItem, ...]
    pages: dict[bytes, tuple[int, ...]]  # digest -> pages


class MediaSteps(NamedTuple):
    """A part of a plan: what each data-parallel rank does."""

    ranks: tuple[MediaStep, ...]
    slice: EncoderSlice | None = None  # beside the decoding rows of the only rank


class _RankStep:
    """The items of one rank's step that is being planned."""

    def __init__(self, max_rows: int, num_pages: int) -> None:
        self.cache = EncoderCache(num_pages)
        self.users: dict[bytes, int] = {}  # of each item: rows of the step that need it
        self.new: dict[bytes, MediaItem] = {}  # those that the step encodes
        self._max_rows = max_rows
        self._rows = 0  # of new ones
        self._pages = 0  # of all of them
        self._referenced_pages = 0  # of them, pages of cached items that requests refer to

    def begin(self) -> None:
        self.users, self.new = {}, {}
        self._rows = self._pages = self._referenced_pages = 0

    def fits(self, item: MediaItem, *, any_rows: bool, few: bool = False) -> bool:
        """Whether a row of the step may need this item too. any_rows: whatever is encoded. few: of
        several items BESIDE_ROWS."""
        if item.digest in self.users:
            return True
        pages = self._pages + pages_for(item.num_rows)
        if item.digest in self.cache or not self.users:
            return pages <= self.cache.num_pages
        others = self.cache.referenced_pages - self._referenced_pages
        rows = self._rows + item.num_rows
        if any_rows:
            return pages <= self.cache.num_pages
        most = min(self._max_rows, BESIDE_ROWS) if few else self._max_rows
        return pages + others <= self.cache.num_pages and (rows <= most or not self.new)

    def add(self, item: MediaItem) -> None:
        """Count a row that needs the item."""
        if item.digest not in self.users:
            self._count(item, 1)
            if item.digest not in self.cache:
                self.new[item.digest] = item
        self.users[item.digest] = self.users.get(item.digest, 0) + 1

    def remove(self, item: MediaItem) -> None:
        """Revert add(item)."""
        self.users[item.digest] -= 1
        if not self.users[item.digest]:
            del self.users[item.digest]
            self.new.pop(item.digest, None)
            self._count(item, -1)

    def _count(self, item: MediaItem, sign: int) -> None:
        pages = pages_for(item.num_rows)
        self._pages += sign * pages
        if item.digest not in self.cache:
            self._rows += sign * item.num_rows
        elif self.cache.is_referenced(item.digest):
            self._referenced_pages += sign * pages

    def place(self) -> MediaStep:
        """Give pages to the items that are encoded, and return the step."""
        for digest in self.users:
            if digest in self.cache:
                self.cache.touch(digest)
        encodes = [
            EncodedItem(item, self.cache.store(digest, item.num_rows, self.users))
            for digest, item in self.new.items()
        ]
        return MediaStep(tuple(encodes), {one: self.cache.pages(one) for one in self.users})


class MediaEncoderLimit(StepBudget, Admission, StepListener):
    """Counts references from the moment a request is added, and items of rows step by step."""

    allows_overtaking = True  # by sequences without items, or whose items are cached

    def __init__(
        self,
        modalities: tuple[str, ...],
        *,
        max_rows: int,
        cache_rows: int,
        row_bytes: int,
        ranks: int = 1,
        whole_prompts: bool = False,
        counts: Mapping[str, int] | None = None,
        max_len: int | None = None,
        paced: bool = False,
        slices: SliceSizes | None = None,
    ) -> None:
        """max_rows: that the encoder makes in one step; an item with more is encoded alone.
        cache_rows: of each data-parallel rank. row_bytes: of one row on the device, for stats.
        whole_prompts: a step computes a prompt whole or not yet, and encodes all of its items.
        counts: items of a modality in one prompt; None: any. max_len: rotary positions are below;
        None: they are not checked. paced: decoding rows have a target; then steps encode few rows
        beside them. slices: how the encoder's work beside them is divided, of one rank; None: it is
        not."""
        assert slices is None or ranks == 1, ranks
        self._modalities = modalities
        self._counts, self._max_len = counts or {}, max_len
        self._num_pages = cache_rows // PAGE_ROWS
        self._whole_prompts = whole_prompts
        self._page_bytes = PAGE_ROWS * row_bytes
        self._ranks = [_RankStep(max_rows, self._num_pages) for _ in range(ranks)]
        self._is_paced = paced or slices is not None
        self._slices = None if slices is None else EncoderSlices(slices, self._ranks[0].cache)
        self._requests: dict[str, Request] = {}  # live ones with items
        self._passes: dict[str, list[int]] = {}  # of each: per item, rows that computed past it
        self._passing: list[tuple[str, int]] = []  # the same of this step: request, item
        self._uses: list[bytes] = []  # items whose first positions are in this step
        self._ending_in_item: set[str] = set()  # requests whose last position is one of an item
        self._decoding = self._decoded = 0  # decoding rows of this step, and of the one before
        self._hits = self._misses = self._encoded_rows = 0

    # -- requests -------------------------------------------------------------------------------

    def check_request(self, request: Request) -> None:
        check_items(request, self._counts)
        if self._max_len is not None:
            check_rope_positions(request, self._max_len)
        for item in request.media:
            if item.modality not in self._modalities:
                served = ", ".join(self._modalities)
                message = f"this model reads no {item.modality}, but {served}"
                raise Unsupported(message, param=item.modality)
            if pages_for(item.num_rows) > self._num_pages:
                what = f"the {item.modality} at position {item.start} of the prompt takes"
                raise self._too_large(what, [item], "make it smaller")
        if self._needs_all(request):
            items = {item.digest: item for item in request.media}.values()
            if sum([pages_for(item.num_rows) for item in items]) > self._num_pages:
                what = "a step takes all items of this prompt, because it is not divided:"
                raise self._too_large(what, items, "send fewer, or make them smaller")

    def _needs_all(self, request: Request) -> bool:
        """Whether the prompt's items must be there in one step."""
        return self._whole_prompts or request.bidirectional_tokens > 0

    def _too_large(self, what: str, items: Iterable[MediaItem], cure: str) -> TooLong:
        rows = sum([item.num_rows for item in items])
        return TooLong(
            f"{what} {rows} embeddings, and the encoder cache holds "
            f"{self._num_pages * PAGE_ROWS}: {cure}, or raise mm_encoder_cache_gb",
            param=next(iter(items)).modality,
        )

    def add_request(self, request: Request) -> None:
        if not request.media:
            return
        self._requests[request.id] = request
        self._passes[request.id] = [0] * len(request.media)
        if request.media[-1].end == len(request.prompt):
            self._ending_in_item.add(request.id)
        for item in request.media:
            for rank in self._ranks:
                rank.cache.add_reference(item.digest)

    def remove_request(self, request: Request) -> None:
        if not request.media:
            return
        del self._requests[request.id]
        self._ending_in_item.discard(request.id)
        for item, passes in zip(request.media, self._passes.pop(request.id), strict=True):
            if not passes:
                self._drop_reference(item)

    def _drop_reference(self, item: MediaItem) -> None:
        for rank in self._ranks:
            rank.cache.remove_reference(item.digest)

    def stats(self) -> MediaStats:
        caches = [rank.cache for rank in self._ranks]
        return MediaStats(
            hits=self._hits,
            misses=self._misses,
            evictions=sum([one.evictions for one in caches]),
            encoded_rows=self._encoded_rows,
            cached=sum([len(one) for one in caches]),
            cached_bytes=sum([one.used_pages for one in caches]) * self._page_bytes,
            capacity_bytes=len(caches) * self._num_pages * self._page_bytes,
        )

    # -- items of a step ------------------------------------------------------------------------

    def begin_step(self, sequences: int) -> None:
        self._decoding, self._decoded = 0, self._decoding
        if self._slices is not None:
            self._slices.wanted.clear()
        for rank in self._ranks:
            if rank.users:
                rank.begin()

    def allow(self, seq: Sequence, want: int) -> int:
        media = seq.request.media
        if not media or seq.planned >= media[-1].end:
            return want
        rank, taken = self._ranks[seq.dp_rank], []
        allowed, whole = want, self._needs_all(seq.request)
        any_rows = whole and not rank.users
        beside = self._is_paced and bool(self._decoding or self._decoded)
        slices = self._slices if beside else None
        for item, position in _needed(seq, want):
            waits = slices is not None and item.digest not in rank.users and slices.want(item)
            if waits or not rank.fits(item, any_rows=any_rows, few=beside):
                allowed = 0 if whole else position - seq.planned
                break
            rank.add(item)  # what follows has to fit beside it
            taken.append(item)
        for item in taken:
            rank.remove(item)
        return allowed

    def take_decode_rows(self, rows: int) -> None:
        self._decoding += rows

    def take(self, seq: Sequence, n: int) -> None:
        self._decoding += seq.planned >= seq.prompt_len
        media = seq.request.media
        if not media or seq.planned >= media[-1].end:
            return
        rank = self._ranks[seq.dp_rank]
        for item, position in _needed(seq, n):
            rank.add(item)
            if position == first_row_position(item, item.start, item.end):
                self._uses.append(item.digest)
        self._passing += _passed(seq, n)

    def undo(self, seq: Sequence, n: int) -> None:
        self._decoding -= seq.planned >= seq.prompt_len
        media = seq.request.media
        if not media or seq.planned >= media[-1].end:
            return
        rank = self._ranks[seq.dp_rank]
        for item, position in _needed(seq, n):
            rank.remove(item)
            if position == first_row_position(item, item.start, item.end):
                self._uses.remove(item.digest)
        for one in _passed(seq, n):
            self._passing.remove(one)

    def free_decode_rows(self) -> int:
        """A row of one token needs no item, unless it is the last one of a prompt."""
        return 0 if self._ending_in_item else NO_BOUND

    def plan_part(self) -> MediaSteps | None:
        if not self._requests:
            return None
        self._count_uses()
        steps = tuple([rank.place() for rank in self._ranks])
        part = None
        if self._slices is not None:
            part = self._slices.advance(self._decoding, self._ranks[0].users)
            if part is not None and part.ends:
                self._count_encoded([one.item for one in part.encodes])
        for request_id, index in self._passing:
            passes = self._passes[request_id]
            if not passes[index]:
                self._drop_reference(self._requests[request_id].media[index])
            passes[index] += 1
        self._passing.clear()
        needed = part is not None or any(step.pages for step in steps)
        return MediaSteps(steps, part) if needed else None

    def _count_uses(self) -> None:
        new = {digest for rank in self._ranks for digest in rank.new}
        if self._slices is not None:
            new |= self._slices.take_unused(self._uses)
        self._hits += len(self._uses) - len(new.intersection(self._uses))
        self._uses.clear()
        for rank in self._ranks:
            self._count_encoded(rank.new.values())

    def _count_encoded(self, items: Collection[MediaItem]) -> None:
        self._misses += len(items)
        self._encoded_rows += sum([one.num_rows for one in items])

    def observe_device_doubt(self) -> None:
        """Forget all rows: what the failed step has written is unknown."""
        self._forget()

    def observe_memory_release(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Forget all rows. Live requests may need all of their items again."""
        for rank in self._ranks:
            rank.cache.clear()
        if self._slices is not None:
            self._slices.forget()
        for request_id, passes in self._passes.items():
            for index, item in enumerate(self._requests[request_id].media):
                if passes[index]:
                    passes[index] = 0
                    for rank in self._ranks:
                        rank.cache.add_reference(item.digest)


def _needed(seq: Sequence, n: int) -> Iterator[tuple[MediaItem, int]]:
    """Yield the items of which a row of n tokens takes rows, each with the first position."""
    start, end = seq.planned, seq.planned + n
    for item in seq.request.media:
        if item.start >= end:
            return
        position = first_row_position(item, start, end) if item.end > start else None
        if position is not None:
            yield item, position


def _passed(seq: Sequence, n: int) -> list[tuple[str, int]]:
    """Return the items past which a row of n tokens computes: request and index."""
    start, end, request = seq.planned, seq.planned + n, seq.request
    return [(request.id, i) for i, one in enumerate(request.media) if start < one.end <= end]
