"""Images of MiniCPM-V 4.7: as 4.6's, with rotary positions on a canvas.

A frame is a whole image and its slices. Rows of slices lie side by side on the canvas of the frame,
rows of the whole image are spread over it, and marks are at corners. All have the time of the
canvas, and what follows is behind its longer side. Marks and line breaks behind a frame belong to
it, up to other text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError
from quire.media.processor import ExpandedItem, Modality
from quire.media.processors import minicpmv4_6
from quire.media.processors.minicpmv4_6 import Grid

MARKS = {
    "image_start_id": "<image>",
    "image_end_id": "</image>",
    "slice_start_id": "<slice>",
    "slice_end_id": "</slice>",
    "newline_id": "\n",
}
"""Fields of config.json with the tokens around rows, and their texts."""
Positions = npt.NDArray[np.int32]


class Crop(NamedTuple):
    """Neighbouring tokens with rows: [start, end) of the prompt."""

    start: int
    end: int
    shape: Grid


class Frame(NamedTuple):
    whole: Crop
    slices: tuple[Crop, ...]
    columns: int  # of slices
    canvas: Grid
    end: int  # of the marks behind it


class Processor(minicpmv4_6.Processor):
    numbered: ClassVar[tuple[Modality, ...]] = ("image",)

    def rope(
        self, ids: Sequence[int], items: Sequence[ExpandedItem]
    ) -> tuple[Positions, int] | None:
        if not items:
            return None
        marks = self._mark_ids()
        found = np.empty((3, len(ids)), np.int32)
        position = at = 0
        for frame in (frame for item in items for frame in _frames(ids, item, marks)):
            position = _count_up(found, at, frame.whole.start - 1, position)
            _place(found, frame, position)
            position += max(frame.canvas) + 1
            at = frame.end
        _count_up(found, at, len(ids), position)
        return found, int(found.max()) + 1 - len(ids)

    def _mark_ids(self) -> frozenset[int]:
        found = []
        for field, text in MARKS.items():
            stated = self.files.config.get(field)
            ids = self.files.tokenize(text) if stated is None else (int(stated),)
            if len(ids) != 1:
                raise ConfigError(
                    f"config.json has no {field}, and the tokenizer no token {text!r}"
                )
            found.append(ids[0])
        return frozenset(found)


def _frames(ids: Sequence[int], item: ExpandedItem, marks: frozenset[int]) -> list[Frame]:
    """Return the frames of an item."""
    tall, wide = item.sizes["grid"]
    shapes = item.sizes["shapes"]
    runs = item.expansion.runs
    each = 1 + tall * wide
    frames = []
    for first in range(0, len(runs), each):
        parts = [
            Crop(item.start + offset, item.start + offset + count, shapes[min(i, 1)])
            for i, (offset, count) in enumerate(runs[first : first + each])
        ]
        canvas = shapes[0] if not tall else (tall * shapes[1][0], wide * shapes[1][1])
        end = parts[-1].end
        while end < len(ids) and ids[end] in marks:
            end += 1
        frames.append(Frame(parts[0], tuple(parts[1:]), wide, canvas, end))
    return frames


def _count_up(found: Positions, start: int, end: int, position: int) -> int:
    """Give tokens [start, end) the positions of text, and return the next one."""
    if end <= start:
        return position
    found[:, start:end] = np.arange(position, position + end - start)
    return position + end - start


def _place(found: Positions, frame: Frame, origin: int) -> None:
    """Write the positions of a frame's tokens."""
    whole, end, (height, width) = frame.whole, frame.end, frame.canvas
    found[:, whole.start - 1 : end] = origin
    found[1:, whole.start - 1] = max(origin - 1, 0)
    if whole.end < end:
        found[1:, whole.end] = origin + height, origin + width
    _place_grid(found, whole, origin, spread(height, whole.shape[0]), spread(width, whole.shape[1]))
    for i, part in enumerate(frame.slices):
        tall, wide = part.shape
        top, left = i // frame.columns * tall, i % frame.columns * wide
        found[1:, part.start - 1] = origin + top, origin + left
        if part.end < end:
            found[1:, part.end] = origin + top + tall - 1, origin + left + wide - 1
        _place_grid(found, part, origin, top + np.arange(tall), left + np.arange(wide))
        if i and not i % frame.columns:  # the line break before a row of slices
            breaks = slice(frame.slices[i - 1].end + 1, part.start - 1)
            found[1, breaks], found[2, breaks] = origin + top - 1, origin + width


def _place_grid(
    found: Positions,
    part: Crop,
    origin: int,
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
) -> None:
    grid = np.stack(np.broadcast_arrays(0, rows[:, None], columns))
    found[:, part.start : part.end] = origin + grid.reshape(3, -1)


def spread(length: int, count: int) -> npt.NDArray[np.int64]:
    """Return `count` whole numbers from 0 to length - 1, at equal distances as nearly as may be."""
    return np.rint(np.linspace(0, length - 1, count)).astype(np.int64)
