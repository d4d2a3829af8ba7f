"""Memory that the GPUs of one group read and write of each other, as the kernels see it.

Each rank has one area. A program of a kernel has a line and four slots in each area:

    line   int32 [32]: word k counts the meetings to which rank k has come; the last word, read by
           the own rank only, counts its own
    slots  2 of terms, 2 of sums. A program writes into slot (meetings % 2) of its own area, so
           a rank that is one meeting ahead writes where no other reads

Nothing is reset between calls, so a replayed CUDA graph continues where the last call ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LINE_WORDS = 32
MAX_RANKS = LINE_WORDS - 1
SLOT_BYTES = 32 * 1024


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


def area_bytes(programs: int) -> int:
    """Bytes of one rank's area."""
    return programs * (LINE_WORDS * 4 + 4 * SLOT_BYTES)
