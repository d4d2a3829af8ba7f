"""Rows of media items at positions of a prompt, and the runs that no step may divide."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from quire.core.types import MediaItem, Request, Sequence
from quire.errors import RequestError


class RowRun(NamedTuple):
    """Neighbouring positions that take neighbouring rows of an item."""

    position: int  # of the prompt
    row: int  # of the item
    count: int  # type: ignore[assignment]  # hides tuple.count


def rows_between(item: MediaItem, start: int, end: int) -> Iterator[RowRun]:
    """Yield the rows of an item that positions [start, end) of the prompt take."""
    row = 0
    for offset, count in item.runs:
        first = item.start + offset
        low, high = max(first, start), min(first + count, end)
        if low < high:
            yield RowRun(low, row + low - first, high - low)
        row += count


def first_row_position(item: MediaItem, start: int, end: int) -> int | None:
    """Return the first of positions [start, end) that takes a row of the item; None: none does."""
    for offset, count in item.runs:
        first = item.start + offset
        if first < end and first + count > start:
            return max(first, start)
    return None


def undivided_runs(request: Request) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of each run of the prompt whose tokens attend to each other in both
    directions, and which no step may divide."""
    if request.bidirectional_tokens:
        yield 0, request.bidirectional_tokens
        return
    for item in request.media:
        if item.bidirectional:
            for offset, count in item.runs:
                yield item.start + offset, item.start + offset + count


def start_of_divided_run(request: Request, end: int) -> int | None:
    """Return where the run begins that a step would divide if it ended before position `end`; None:
    it would divide none."""
    return next((first for first, last in undivided_runs(request) if first < end < last), None)


def longest_undivided(request: Request) -> int:
    """Return how many tokens its longest run has that no step may divide; 0: it has none."""
    if not request.media:
        return 0
    return max((last - first for first, last in undivided_runs(request)), default=0)


def least_tokens(seq: Sequence) -> int:
    """Return the least number of tokens that the sequence's next row can have: 1, or all of a run
    that no step may divide."""
    start = seq.planned
    return next((last - first for first, last in undivided_runs(seq.request) if first == start), 1)


def check_items(request: Request, most: Mapping[str, int]) -> None:
    """Raise RequestError unless the items are in order within the prompt, and separate its cached
    blocks from those of other items. most: items of a modality."""
    end, size = 0, len(request.prompt)
    separated = {*request.extra_content}
    for modality, count in Counter(item.modality for item in request.media).items():
        if count > most.get(modality, count):
            message = f"At most {most[modality]} {modality}(s) may be provided in one prompt"
            raise RequestError(f"{message}; got {count}.", param=modality)
    for item in request.media:
        offset = 0
        for start, count in item.runs:
            if start < offset or count < 1:
                raise _wrong(item, f"has rows at {item.runs!r:.80}, out of order")
            offset = start + count
        if item.start < end or offset > item.length or item.end > size:
            raise _wrong(item, f"has {item.length} positions of a prompt of {size}, from {end} on")
        if (item.start, item.digest) not in separated:
            raise _wrong(item, "has no digest in extra_content")
        end = item.end
    if request.rope_positions and len(request.rope_positions) % (4 * size):
        raise RequestError(
            f"rope_positions has {len(request.rope_positions)} bytes; it must be int32 for each of "
            f"{size} positions of the prompt",
            param="prompt",
        )
    if not 0 <= request.bidirectional_tokens <= size:
        message = f"bidirectional_tokens is {request.bidirectional_tokens}; the prompt has {size}"
        raise RequestError(message, param="prompt")


def check_rope_positions(request: Request, max_len: int) -> None:
    """Raise RequestError unless rotary positions, of later tokens too, are in [0, max_len)."""
    given = request.rope_positions
    if not given:
        return
    positions = struct.unpack(f"<{len(given) // 4}i", given)
    last = len(request.prompt) - 1 + request.rope_delta
    if min(min(positions), last) < 0 or max(max(positions), last) >= max_len:
        message = f"rope_positions and rope_delta must lead to positions in [0, {max_len})"
        raise RequestError(message, param="prompt")


def _wrong(item: MediaItem, problem: str) -> RequestError:
    message = f"the {item.modality} at position {item.start} of the prompt {problem}"
    return RequestError(message, param=item.modality)
