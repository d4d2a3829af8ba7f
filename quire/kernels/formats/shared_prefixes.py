"""Shared prefixes: leading keys that several sequences of one step have in common.

Sequences with the same leading blocks form a group, cut into tiles of a few sequences. A kernel
reads the keys of a tile once for all of its sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SharedPrefixes(NamedTuple):
    """The groups of S sequences, in N tiles."""

    lengths: Tensor  # [S] int32: leading tokens in common, fewer than the context; 0: none
    members: Tensor  # [S] int32: sequences, those of one tile side by side
    tiles: (
        Tensor  # [N, 3] int32: first place in `members`, sequences, tokens; 0s behind those in use
    )
    tile_rows: int  # sequences of a tile, at most
