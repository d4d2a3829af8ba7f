"""Which rows of state tensors the rows of a step read and write."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """Of S rows: first those of one token, then those of several.

    rows: row of the tensors for each; those that pad a step share the last row of the tensors.
    """

    rows: Tensor  # [S] int64
    decodes: int  # leading rows of one token: token i is row i's
    spans: tuple[tuple[int, int], ...] = ()  # of each other row: its first token, and its end
