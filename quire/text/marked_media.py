"""Media in texts that become prompts later: both sides of a score, or the items of a list.

Each item has a mark in its text. So texts stay texts, whatever joins them or writes them into a
template, and the order of the marks is the order of the items in the prompt.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import RequestError
from quire.media.content_parts import ReadTensor, read_part
from quire.media.expand import ReadyItem
from quire.media.items import MediaSource, param_of
from quire.text.media_prompt import MediaInputs, MediaReader, PlaceholderGuard

MAX_ITEMS = 999
"""Of all texts of one request."""
MAX_TENSOR_BYTES = 2 << 30
"""Of all items of one request, processed."""
STARTED = 32
"""Texts whose items are prepared at once, for callers without an event loop."""


class MarkedTexts:
    """The media of the texts of one request: read first, then bound to a model and prepared."""

    def __init__(self) -> None:
        self._nonce = f"q{secrets.token_hex(12)}m"
        self._mark = re.compile(rf"{self._nonce}(\d+)q")
        self._given: list[tuple[Mapping[str, Any], str]] = []
        self._parts: list[MediaSource] = []
        self._items: dict[int, ReadyItem] = {}
        self._guard: PlaceholderGuard | None = None
        self._reader: MediaReader | None = None

    @property
    def has_media(self) -> bool:
        """Whether a part was added."""
        return bool(self._given)

    def add(self, part: Mapping[str, Any], where: str) -> str:
        """Add a part of a text, and return its mark. where: the part's place in the request.

        Raises RequestError for too many.
        """
        if len(self._given) == MAX_ITEMS:
            message = f"a request may have {MAX_ITEMS} images, videos and recordings in all"
            raise RequestError(message, param=param_of(where))
        self._given.append((part, where))
        return f"{self._nonce}{len(self._given) - 1}q"

    def bind(
        self,
        reader: MediaReader | None,
        *,
        objects: bool = False,
        read_tensor: ReadTensor | None = None,
    ) -> None:
        """Read the parts for a model. objects, read_tensor: of content_parts.extract_parts.

        Raises RequestError, also for None: a model that reads text only.
        """
        if reader is None:
            where = self._given[0][1]
            raise RequestError(f"{where}: this model reads text only", param=param_of(where))
        self._reader, self._guard = reader, reader.placeholder_guard()
        self._parts = [read_part(*one, objects, read_tensor) for one in self._given]

    def marked(self, text: str) -> list[int]:
        """Return the numbers of the items that are marked in a text."""
        return [int(match[1]) for match in self._mark.finditer(text)]

    def parts(self, numbers: Iterable[int]) -> list[MediaSource]:
        """Return items that are to be prepared."""
        return [self._parts[i] for i in numbers]

    def put(self, numbers: Iterable[int], items: Iterable[ReadyItem]) -> None:
        """Keep prepared items. Raises RequestError if all of them are too large together."""
        for number, item in zip(numbers, items):
            self._items[number] = item
            check_bytes(self._items.values(), self._parts[number].param)

    def prepare_blocking(self, texts: Iterable[str]) -> None:
        """Prepare the items of texts, for a thread without an event loop. Raises as prepare()."""
        assert self._reader is not None, "bind() comes first"
        groups = [numbers for one in dict.fromkeys(texts) if (numbers := self.marked(one))]
        for start in range(0, len(groups), STARTED):
            some = groups[start : start + STARTED]
            futures = [self._reader.start_parts(self.parts(one)) for one in some]
            for numbers, future in zip(some, futures):
                self.put(numbers, future.result())

    def protect(self, text: str) -> str:
        """Return a text in which no placeholder is left that its author typed."""
        assert self._guard is not None, "bind() comes first"
        return self._guard.protect(text)

    def write(self, text: str, *, is_rendered: bool = False) -> tuple[str, MediaInputs | None]:
        """Return a prompt with placeholders for its marks, and the media of these, in order.

        is_rendered: a template wrote it. None: it has neither media nor characters of a
        placeholder. Raises RequestError for more items than a prompt may have.
        """
        assert self._guard is not None, "bind() comes first"
        assert self._reader is not None
        pipeline = self._reader.pipeline
        pipeline.check_counts(self.parts(self.marked(text)))
        items: list[ReadyItem] = []
        numbers: dict[str, int] = {}

        def place(match: re.Match[str]) -> str:
            one = self._items[int(match[1])]
            number = numbers[one.modality] = numbers.get(one.modality, 0) + 1
            expansion = pipeline.processor.expand(one.media, number)
            items.append(replace(one, index=number, expansion=expansion))
            form = pipeline.processor.placeholder(one.modality, number)
            return f"{form}{match[2]}" if form else ""  # the line break is of the placeholder

        marks = re.compile(rf"{self._mark.pattern}(\n?)")
        text, literals = self._guard.restore(marks.sub(place, text))
        if not items and not literals:
            return text, None
        return text, MediaInputs(items, literals, is_rendered)


def check_bytes(items: Iterable[ReadyItem], param: str) -> None:
    """Raise RequestError for items of one request that are too large together."""
    if sum(len(tensor.data) for one in items for tensor in one.media.tensors) > MAX_TENSOR_BYTES:
        raise RequestError(
            "the images, videos and recordings of the request take more than "
            f"{MAX_TENSOR_BYTES >> 30} GiB when they are processed: send fewer at once",
            param=param,
        )
