"""Block copy kernel: moves whole KV blocks on the GPU, out to pinned host memory, and back in.

One launch for all layers, from a table of addresses. Pinned memory has an address that the GPU can
use, so a swap is the same kernel: it needs neither staging nor a call per block. The bus is the
limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.int_math import cdiv

BLOCK = 2048


@dataclass(frozen=True, slots=True)
class BlockCopyTable:
    """The KV tensors of one memory, one per place."""

    tensors: tuple[Tensor, ...]  # kept alive
    addresses: Tensor  # [places] int64 on the device
    words: Tensor  # [places] int64: int32 words of one block
    max_words: int

    @classmethod
    def build(cls, tensors: Sequence[Tensor], device: torch.device) -> BlockCopyTable:
        """tensors: contiguous [N, ...], on the device or pinned."""
        sizes = [one[0].nbytes // 4 if len(one) else 0 for one in tensors]
        assert all(not len(one) or one[0].nbytes % 16 == 0 for one in tensors)
        return cls(
            tuple(tensors),
            torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64, device=device),
            torch.tensor(sizes, dtype=torch.int64, device=device),
            max(sizes, default=0),
        )


@triton.jit
def _block_copy_kernel(
    source_ptr,  # [places] addresses
    target_ptr,  # [places] addresses
    words_ptr,  # [places]
    pair_ptr,  # [n, 2] source block, target block
    BLOCK: tl.constexpr,
):
    pair, place, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    words = tl.load(words_ptr + place)
    source = tl.load(source_ptr + place).to(tl.pointer_type(tl.int32))
    target = tl.load(target_ptr + place).to(tl.pointer_type(tl.int32))
    source += tl.multiple_of(tl.load(pair_ptr + 2 * pair).to(tl.int64) * words, 4)
    target += tl.multiple_of(tl.load(pair_ptr + 2 * pair + 1).to(tl.int64) * words, 4)
    i = part * BLOCK + tl.arange(0, BLOCK)
    live = i < words
    tl.store(target + i, tl.load(source + i, mask=live, other=0), mask=live)


def copy_blocks(source: BlockCopyTable, target: BlockCopyTable, pairs: Tensor, count: int) -> None:
    """target[dst] = source[src] in every place. pairs: [2 * count] int32 on the device."""
    parts = cdiv(source.max_words, BLOCK)
    grid = (count, len(source.tensors), parts)
    _block_copy_kernel[grid](source.addresses, target.addresses, source.words, pairs, BLOCK=BLOCK)
