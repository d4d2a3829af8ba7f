"""Stage tokens on GPUs: the last stage writes into the first stage's memory, which waits there.

    area    int32: word 0 counts messages; from word LINE_WORDS on, the last token of each slot

A message is the tokens of all slots, then one more in the count. Nothing is sent back: a step of
the first stage that waits for a message needs only that this many have come, and a later one has
all of its tokens (quire.distributed.stage_tokens).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel

LINE_WORDS = 32
_LINE = tl.constexpr(LINE_WORDS)
_POLL = tl.constexpr(4096)
"""Tries between two looks at the abort word, which is in host memory."""
_BLOCK = 256


def area_bytes(slots: int) -> int:
    """Bytes of an area for so many slots."""
    return 4 * (LINE_WORDS + slots)


@triton.jit
def _area(area_ptr):
    return tl.load(area_ptr).to(tl.pointer_type(tl.int32))


@kernel("slots")
def _send_tokens(
    last_ptr,  # [M]
    area_ptr,  # int64 [1], the address of the first stage's area
    slots,  # M
    BLOCK: tl.constexpr,
):
    area = _area(area_ptr)
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        live = i < slots
        tl.store(area + _LINE + i, tl.load(last_ptr + i, live, 0), live)
    tl.debug_barrier()  # the stores of all threads come before the count
    tl.atomic_add(area, 1, sem="release", scope="sys")


@kernel("number", "slots")
def _receive_tokens(
    last_ptr,  # [M] out
    area_ptr,  # int64 [1], the address of this rank's area
    abort_ptr,  # int32 [1]
    number,  # of the message; the count is as large, or larger
    slots,  # M
    BLOCK: tl.constexpr,
):
    area = _area(area_ptr)
    missing = number - tl.atomic_add(area, 0, sem="acquire", scope="sys")
    tries = 0
    while missing > 0:
        missing = number - tl.atomic_add(area, 0, sem="acquire", scope="sys")
        tries += 1
        if tries % _POLL == 0:
            if tl.load(abort_ptr, volatile=True) != 0:
                missing = 0
    tl.debug_barrier()
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        live = i < slots
        tl.store(last_ptr + i, tl.load(area + _LINE + i, live, 0, volatile=True), live)


def send(last_tokens: Tensor, area: Tensor) -> None:
    """Send last_tokens [M] int32 to the area at this address: int64 [1]."""
    _send_tokens((1, 1, 1), (last_tokens, area), (len(last_tokens),), (_BLOCK,))


def receive(number: int, last_tokens: Tensor, area: Tensor, abort: Tensor) -> None:
    """Wait for a message, and overwrite last_tokens [M] int32 with it or a later one.

    number: of the message, of 32 bits that may have wrapped. area: int64 [1], its address. abort:
    int32 [1] in pinned host memory; not 0: nothing is waited for any longer.
    """
    tensors = last_tokens, area, abort
    _receive_tokens((1, 1, 1), tensors, (number, len(last_tokens)), (_BLOCK,))
