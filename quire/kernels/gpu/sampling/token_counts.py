"""Token counts kernel: counts the sampled token of each row."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

_ROWS = 128


@kernel("R")
def _update_token_counts_kernel(
    ids_ptr,  # [R]
    slots_ptr,  # [R]
    counts_ptr,  # [slots, V] int16, in place
    R,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + r, mask=r < R, other=-1)
    at = counts_ptr + slot.to(tl.int64) * V + tl.load(ids_ptr + r, mask=r < R, other=0)
    had = tl.load(at, mask=slot >= 0, other=0).to(tl.int32)
    more = (had & -0x8000) | tl.minimum((had & 0x7FFF) + 1, 0x7FFF)
    tl.store(at, more.to(tl.int16), mask=slot >= 0)


def outputs(ids: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    return counts


def launch(out: Tensor, ids: Tensor, slots: Tensor, counts: Tensor) -> None:
    rows = len(ids)
    if not rows:
        return
    _update_token_counts_kernel(
        (cdiv(rows, _ROWS), 1, 1),
        (ids, slots, counts),
        (rows,),
        (counts.shape[1], _ROWS, PDL_ENABLED),
        warps=4,
        pdl=PDL_ENABLED,
    )
