"""Which rows of state tensors the rows of a step read and write."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from quire.kernels.native.op_tape import refuse_recording

NATIVE_FIELDS = "qqqqq"
"""What native ops read of the rows (see native_fields)."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """Of S rows: first those of one token, then those of several.

    rows: row of the tensors for each; those that pad a step share the last row of the tensors.
    """

    rows: Tensor  # [S] int64
    decodes: int  # leading rows of one token: token i is row i's
    spans: tuple[tuple[int, int], ...] = ()  # of each other row: its first token, and its end

    def native_fields(self) -> tuple[tuple[int, ...], array[int]]:
        """Return the rows as native ops read them, and memory to keep until the op has run.

        Raises: NotRecordableError if a tape with rows of several tokens is recorded.
        """
        assert self.rows.dtype == torch.int64, f"rows of states are {self.rows.dtype}, not int64"
        if self.spans:
            refuse_recording("a row of several tokens")
        ends = array("q", chain.from_iterable(self.spans))
        rows = self.rows.data_ptr()
        return (rows, rows, ends.buffer_info()[0], self.decodes, len(self.rows)), ends


def has_whole_rows(x: Tensor) -> bool:
    """Whether each row of x, over its first axis, is contiguous."""
    return x.dim() < 2 or x[:1].is_contiguous()
