"""Programmatic dependent launch: a kernel's start overlaps the end of the one before it.

A kernel launched with pdl=True may begin while the previous one runs. Each of its programs must
wait before it accesses memory that an earlier kernel may write or read, and must wait in any case,
or a third kernel could overtake the first. Weights may be read before the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PDL_ENABLED = not triton.knobs.runtime.interpret
"""Whether kernels are launched this way: all but those that the interpreter runs."""


@triton.jit
def wait_for_previous_kernel():
    """Wait until the previous kernel is done and its writes are visible."""
    gdc_wait()


@triton.jit
def launch_dependents():
    """Allow the next kernel to begin once every program of this one has called this, or ended."""
    gdc_launch_dependents()


@triton.jit
def prefetch_l2(ptr, BYTES: tl.constexpr):
    """Prefetch a range of device memory into L2: one thread, one instruction."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptr.to(tl.int64), BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
