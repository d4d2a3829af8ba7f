"""Encoder budget: bounds the tokens of the sources that one step encodes.

A source is encoded whole, by the step that starts the first sequence that needs it. The plan says
whether some row has a token that sees less than the last source of its request.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.core.media.item_rows import check_items
from quire.core.media.sources import has_sources, sources_of
from quire.core.scheduling.limits.base import NO_BOUND, Admission, StepBudget
from quire.core.types import Request, Sequence
from quire.errors import TooLong


class PartialViews(NamedTuple):
    """A part of a plan: some rows have tokens that see less than the last source."""

    rows: int


class EncoderBudget(StepBudget, Admission):
    """per_step: at least max_len, so that every source that is accepted fits into some step."""

    allows_overtaking = True  # by sequences whose source is known already

    def __init__(self, per_step: int, max_len: int) -> None:
        assert per_step >= max_len > 0, (per_step, max_len)
        self._per_step = per_step
        self._max_len = max_len
        self._left = per_step
        self._before = self._latest = -1  # latest step that encodes, before this step and of all
        self._partial_views = 0

    def check_request(self, request: Request) -> None:
        check_items(request, {})
        length = sum([one.length for one in sources_of(request)])
        if length <= self._max_len:
            return
        if request.encoder_prompt:
            raise TooLong(
                f"the encoder prompt has {length} tokens; at most {self._max_len} are allowed",
                param="encoder_prompt",
            )
        raise TooLong(
            f"the images of the prompt have {length} positions, and those of one prompt have at "
            f"most {self._max_len}: send fewer or smaller ones, or raise limit_mm_per_prompt",
            param="image",
        )

    def begin_step(self, sequences: int) -> None:
        self._left = self._per_step
        self._before = self._latest
        self._partial_views = 0

    def allow(self, seq: Sequence, want: int) -> int:
        if (seq.cross_tables and all(seq.cross_tables)) or not has_sources(seq.request):
            return want
        sources = sources_of(seq.request)
        tables = seq.cross_tables or [[] for _ in sources]
        new = sum([one.length for one, table in zip(sources, tables, strict=True) if not table])
        return want if new <= self._left else 0

    def take(self, seq: Sequence, n: int) -> None:
        if seq.encoder_step > self._before:  # it starts with this step
            self._left -= self._new_length(seq)
            self._latest = seq.encoder_step
        self._partial_views += _is_partial(seq)

    def undo(self, seq: Sequence, n: int) -> None:
        if seq.encoder_step > self._before:
            self._left += self._new_length(seq)
        self._partial_views -= _is_partial(seq)

    def _new_length(self, seq: Sequence) -> int:
        sources = sources_of(seq.request)
        return sum([sources[i].length for i in seq.new_sources])

    def plan_part(self) -> PartialViews | None:
        return PartialViews(self._partial_views) if self._partial_views else None

    def free_decode_rows(self) -> int:
        return NO_BOUND


def _is_partial(seq: Sequence) -> bool:
    """Whether its next row begins before the last image of the prompt."""
    media = seq.request.media
    return bool(media) and seq.planned < media[-1].start
