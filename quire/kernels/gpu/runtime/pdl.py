"""Programmatic dependent launch: a kernel's start overlaps the end of the one before it.

A kernel launched with pdl=True may begin while the previous one runs. Each of its programs must
wait before it accesses memory that an earlier kernel may write or read, and must wait in any case,
or a third kernel could overtake the first. Weights may be read before the wait.

GPUs before Hopper have none of it: what is compiled for them starts after the previous kernel, and
these functions do nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from quire.kernels.gpu.runtime.target import gpu_target

PDL_ENABLED = not triton.knobs.runtime.interpret
"""Whether kernels ask for it: all but those that the interpreter runs."""
_MIN_CAPABILITY = (9, 0)


def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on the device can be launched this way."""
    return gpu_target(device).capability >= _MIN_CAPABILITY


def _compiled_capability() -> int:
    return int(driver.active.get_current_target().arch)


# no part of a kernel's key, which has the target anyway
_compiled_capability.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.constexpr_function
def _target_has_pdl() -> bool:
    return _compiled_capability() >= 10 * _MIN_CAPABILITY[0] + _MIN_CAPABILITY[1]


@triton.jit
def wait_for_previous_kernel():
    """Wait until the previous kernel is done and its writes are visible."""
    if _target_has_pdl():
        gdc_wait()


@triton.jit
def launch_dependents():
    """Allow the next kernel to begin once every program of this one has called this, or ended."""
    if _target_has_pdl():
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(ptr, BYTES: tl.constexpr):
    """Prefetch a range of device memory into L2: one thread, one instruction."""
    if _target_has_pdl():  # the instruction is as new
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
            " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [ptr.to(tl.int64), BYTES],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
