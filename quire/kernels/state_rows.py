"""Which rows of state tensors the rows of a step read and write."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain

import torch
from torch import Tensor

from quire.kernels.native.op_tape import refuse_recording

NATIVE_FIELDS = "qqqqq"
"""What native ops read of the rows (see native_fields)."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """Of S rows: first those of one token, then those of several.

    Rows are computed in order: one may read what a row before it has written, as the drafts of a
    sequence do.

    rows: row of the tensors that each writes; those that pad a step share the last row of the
    tensors. sources: row that each reads, the same without drafts. order: with drafts, the rows of
    one token in groups [n] int64, none of which reads what a row of its own group or a later one
    writes; (): they are one group. GPU kernels read neither `order` nor `spans`: to them a row of
    one token may read what the row right before it writes, and no other's.
    """

    rows: Tensor  # [S] int64
    decodes: int  # leading rows of one token: token i is row i's
    spans: tuple[tuple[int, int], ...] = ()  # of each other row: its first token, and its end
    _: KW_ONLY
    sources: Tensor = field(default=None)  # type: ignore[assignment]  # [S] int64
    order: tuple[Tensor, ...] = ()
    starts: Tensor | None = None  # [S + 1] int32: first token of each row, and the end of the last

    def __post_init__(self) -> None:
        if self.sources is None:
            object.__setattr__(self, "sources", self.rows)

    def groups(self) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
        """Yield rows of one token that can be computed at once: (tokens, sources, rows)."""
        all_at_once = (slice(0, self.decodes),) if self.decodes else ()
        for at in self.order or all_at_once:
            yield at, self.sources[at], self.rows[at]

    def token_starts(self) -> Tensor:
        """Return `starts`, made of `spans` where they are not given."""
        if self.starts is None:
            firsts = [*range(self.decodes), *(start for start, _ in self.spans)]
            firsts.append(self.spans[-1][1] if self.spans else self.decodes)
            made = torch.tensor(firsts, dtype=torch.int32, device=self.rows.device)
            object.__setattr__(self, "starts", made)
        assert self.starts is not None
        return self.starts

    def native_fields(self) -> tuple[tuple[int, ...], array[int]]:
        """Return the rows as native ops read them, and memory to keep until the op has run.

        Raises: NotRecordableError if a tape with rows of several tokens is recorded.
        """
        kinds = {self.rows.dtype, self.sources.dtype}
        assert kinds == {torch.int64}, f"rows of states are {kinds}, not int64"
        if self.spans:
            refuse_recording("a row of several tokens")
        ends = array("q", chain.from_iterable(self.spans))
        read, written = self.sources.data_ptr(), self.rows.data_ptr()
        return (read, written, ends.buffer_info()[0], self.decodes, len(self.rows)), ends


def has_whole_rows(x: Tensor) -> bool:
    """Whether each row of x, over its first axis, is contiguous."""
    return x.dim() < 2 or x[:1].is_contiguous()
