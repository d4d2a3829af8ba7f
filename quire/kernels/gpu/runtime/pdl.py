"""Programmatic dependent launch: a kernel's start overlaps the end of the one before it.

A kernel launched with pdl=True may begin while its forerunner runs. Every program of it must wait
before it reads or writes what any earlier kernel may write or read, and must wait at all, or a
third kernel could overtake the first. Weights may be touched before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PDL_ENABLED = not triton.knobs.runtime.interpret
"""Whether kernels are launched so: all but those that the interpreter runs."""


@triton.jit
def wait_for_previous_kernel():
    """Until the kernel before is done and its memory is seen."""
    gdc_wait()


@triton.jit
def launch_dependents():
    """The next kernel may begin once every program of this one has said so, or ended."""
    gdc_launch_dependents()


@triton.jit
def prefetch_l2(ptr, BYTES: tl.constexpr):
    """Ask for a stretch of device memory to be brought into L2: one thread, one instruction."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptr.to(tl.int64), BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
