"""Sources: what an encoder reads at once, and the positions of the prompt that see it.

The encoder prompt of a request is one source, which all of its tokens see. The images of a model
with cross attention are sources too: neighbours are one, and a token sees the images of the last
source that begins at it or before it, up to the last image that does.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from quire.core.types import MediaItem, Request


class Source(NamedTuple):
    """start: the first position that sees it. items: what it is made of, if not of token ids."""

    start: int
    length: int  # positions of the encoder's output
    items: tuple[MediaItem, ...]

    def views(self) -> list[tuple[int, int]]:
        """Return (first position, length that is seen from there on)."""
        rows = accumulate(one.source_rows for one in self.items)
        found = [(one.start, length) for one, length in zip(self.items, rows) if length]
        return found or [(self.start, self.length)]


def has_sources(request: Request) -> bool:
    """Whether cross attention reads anything for it."""
    return bool(request.encoder_prompt) or any(one.source_rows for one in request.media)


def sources_of(request: Request) -> list[Source]:
    """Return the sources of a request, by their first positions."""
    if request.encoder_prompt:
        media = () if request.encoder_media is None else (request.encoder_media,)
        return [Source(0, len(request.encoder_prompt), media)]
    found: list[Source] = []
    for item in request.media:
        if found and found[-1].items[-1].end == item.start:
            last = found.pop()
            found.append(Source(last.start, last.length + item.source_rows, (*last.items, item)))
        elif item.source_rows:
            found.append(Source(item.start, item.source_rows, (item,)))
    return found
