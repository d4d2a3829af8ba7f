"""Puts the tokens of media into a prompt: placeholders are replaced, on token ids.

    ids with one placeholder for each item  ->  ids with all tokens of the items, and MediaItems

Text of users is tokenized so that it has no placeholders (quire.text.marked_media); what
matches here was written by a chat template or by the author of a raw prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.core.types import MediaItem
from quire.errors import RequestError
from quire.media.processor import (
    ExpandedItem,
    Expansion,
    MediaProcessor,
    Modality,
    ProcessedMedia,
)


@dataclass(frozen=True, slots=True)
class ReadyItem:
    """An item with its tensors and tokens. index: in its modality, from 1."""

    modality: Modality
    index: int
    digest: bytes
    media: ProcessedMedia
    expansion: Expansion


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """The fields of a Request for media, and the prompt with their tokens."""

    ids: tuple[int, ...]
    items: tuple[MediaItem, ...] = ()
    extra_content: tuple[tuple[int, bytes], ...] = ()
    rope_positions: bytes = b""
    rope_delta: int = 0
    bidirectional_tokens: int = 0

    def request_fields(self) -> dict[str, Any]:
        """Return the fields of a Request, all but the prompt."""
        return {
            "media": self.items,
            "extra_content": self.extra_content,
            "rope_positions": self.rope_positions,
            "rope_delta": self.rope_delta,
            "bidirectional_tokens": self.bidirectional_tokens,
        }


def place_items(
    ids: Sequence[int],
    items: Sequence[ReadyItem],
    processor: MediaProcessor,
    *,
    may_be_expanded: bool = False,
    param: str = "prompt",
) -> PlacedMedia:
    """Expand the placeholders of a prompt. Items of a modality are in the order of the prompt.

    may_be_expanded: the prompt came as token ids, which may have all tokens of an item already.
    Raises RequestError where placeholders and items disagree in number.
    """
    made: list[int] = []
    placed: list[tuple[int, ReadyItem]] = []
    inserted = sorted(
        (one for one in items if not one.expansion.replaces),
        key=lambda one: one.expansion.insert_at,
    )
    waiting = [one for one in items if one.expansion.replaces]
    queues = [
        [one for one in waiting if one.modality == modality]
        for modality in dict.fromkeys(one.modality for one in waiting)
    ]
    ids = tuple(ids)
    forms = {(one.modality, one.expansion.replaces) for one in waiting}
    extra: dict[str, int] = {}
    at = 0
    while at <= len(ids):
        while inserted and inserted[0].expansion.insert_at <= at:
            _add(made, placed, inserted.pop(0))
        before = placed[-1][1].expansion if placed and _end(*placed[-1]) == len(made) else None
        match = next(_matches(ids, at, queues, may_be_expanded, before), None)
        if match is not None:
            queue, item, length = match
            _add(made, placed, item)
            queue.pop(0)
            at += length
            continue
        for modality, form in forms:
            if ids[at : at + len(form)] == form:
                extra[modality] = extra.get(modality, 0) + 1
        made.extend(ids[at : at + 1])
        at += 1
    for one in inserted:
        _add(made, placed, one)
    _check_numbers(items, placed, extra, processor, param)
    return _finish(made, placed, processor)


def _add(made: list[int], placed: list[tuple[int, ReadyItem]], item: ReadyItem) -> None:
    placed.append((len(made), item))
    made.extend(item.expansion.token_ids)


def _end(start: int, item: ReadyItem) -> int:
    return start + len(item.expansion.token_ids)


def _matches(
    ids: tuple[int, ...],
    at: int,
    queues: Sequence[list[ReadyItem]],
    may_be_expanded: bool,
    before: Expansion | None,
) -> Iterator[tuple[list[ReadyItem], ReadyItem, int]]:
    """Yield the next item of a modality, and how much of the prompt it replaces at a position.

    before: of the item that ends there.
    """
    for queue in queues:
        if not queue:
            continue
        item, expansion = queue[0], queue[0].expansion
        if expansion.shares_border and before is not None and before.shares_border:
            expansion = expansion.without_first()
            item = replace(item, expansion=expansion)
        forms = [expansion.token_ids] if may_be_expanded else []
        for form in (*forms, expansion.replaces):
            if ids[at : at + len(form)] == form:
                yield queue, item, len(form)


def _check_numbers(
    items: Sequence[ReadyItem],
    placed: Sequence[tuple[int, ReadyItem]],
    extra: Mapping[str, int],
    processor: MediaProcessor,
    param: str,
) -> None:
    for modality in dict.fromkeys(one.modality for one in items):
        given = [one for one in items if one.modality == modality]
        found = sum(one.modality == modality for _, one in placed)
        text = processor.placeholder(modality, found + 1)
        if found < len(given):
            raise RequestError(
                f"the prompt has {found} placeholders for {modality}, and {len(given)} items of "
                f"{modality} were given: write {text!r} once for each item",
                param=param,
            )
        check_number(found + extra.get(modality, 0), len(given), text, modality, param)


def check_number(total: int, given: int, text: str, modality: Modality, param: str) -> None:
    """Raise RequestError if a prompt has more placeholders than items were given.

    text: a placeholder that is not given.
    """
    if total > given:
        raise RequestError(
            f"Found more {text!r} placeholders in input prompt than actual multimodal data "
            f"items: {total} placeholders, {given} items of {modality}",
            param=param,
        )


def _finish(
    made: list[int], placed: Sequence[tuple[int, ReadyItem]], processor: MediaProcessor
) -> PlacedMedia:
    found = tuple(
        MediaItem(
            modality=one.modality,
            digest=one.digest,
            start=start,
            length=len(one.expansion.token_ids),
            runs=one.expansion.runs,
            tensors=one.media.tensors,
            bidirectional=one.expansion.bidirectional,
            source_rows=one.expansion.source_rows,
        )
        for start, one in placed
    )
    spans = [
        ExpandedItem(one.modality, start, one.expansion, one.media.sizes) for start, one in placed
    ]
    positions, delta = b"", 0
    rope = processor.rope(made, spans)
    if rope is not None:
        array, delta = rope
        assert array.shape == (3, len(made)), array.shape
        positions = np.ascontiguousarray(array, dtype="<i4").tobytes()
    content = tuple((one.start, one.digest) for one in found)
    together = len(made) if found and processor.bidirectional_prompt else 0
    return PlacedMedia(tuple(made), found, content, positions, int(delta), together)
