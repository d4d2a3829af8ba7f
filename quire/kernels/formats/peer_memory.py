"""Memory that the GPUs of one group read and write of each other, as the kernels see it.

Each rank has one area. A program of a kernel has a line and some slots in each area:

    line     int32 [32]: word k counts the meetings to which rank k has come; the last two, read by
             the own rank only, count its own meetings and its own sums of flagged terms
    slots    2 of terms, 2 of sums. A program writes into slot (meetings % 2) of its own area, so
             a rank that is one meeting ahead writes where no other reads
    flagged  2 of terms for each rank, which that rank writes (sums % 2). Each int64 has 4 bytes of
             terms, and the number of the sum above them: it is there when its number is

Nothing is reset between calls, so a replayed CUDA graph continues where the last call ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LINE_WORDS = 32
MAX_RANKS = LINE_WORDS - 2
SLOT_BYTES = 32 * 1024
MAX_FLAGGED_RANKS = 8
"""With more there are no slots of flagged terms."""


@dataclass(frozen=True, slots=True, eq=False)
class PeerMemory:
    """areas: int64 [N], where each rank's area begins, as addresses of this process.

    abort: int32 [1] in pinned host memory; not 0: kernels wait for no rank any longer, and what
    they return has no meaning.
    """

    areas: Tensor
    abort: Tensor
    rank: int
    ranks: int
    programs: int  # of a kernel, at most: all of them run at the same time

    def fits(self, x: Tensor) -> bool:
        """Whether rows of x [T, E] can be summed in it."""
        size = x.shape[-1] * x.element_size()
        return x.dim() == 2 and x.is_contiguous() and size <= SLOT_BYTES and x.dtype in _DTYPES


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def flagged_start(programs: int) -> int:
    """Bytes of an area before its slots of flagged terms."""
    return programs * (LINE_WORDS * 4 + 4 * SLOT_BYTES)


def area_bytes(programs: int, ranks: int) -> int:
    """Bytes of one rank's area."""
    flagged = 2 * ranks if ranks <= MAX_FLAGGED_RANKS else 0
    return flagged_start(programs) + programs * flagged * SLOT_BYTES
