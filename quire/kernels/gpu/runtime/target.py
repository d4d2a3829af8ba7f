"""Target GPU: the facts by which kernels choose their variants.

They are the device's own, or given ones: quire.kernels.framework.meta_device describes a GPU that
the process does not have, to find out which kernels an engine on it would need.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class GpuTarget(NamedTuple):
    """One kind of GPU. capability (0, 0): the interpreter."""

    capability: tuple[int, int]
    sm_count: int


INTERPRETER = GpuTarget((0, 0), 132)
"""On CPU tensors, as in tests: the sizes of an H200, and none of its instructions."""

_described: GpuTarget | None = None


def describe_target(target: GpuTarget | None) -> None:
    """Make gpu_target() return these facts, whatever the device is; None: the device's own."""
    global _described
    _described = target


def gpu_target(device: torch.device) -> GpuTarget:
    """Return the facts of the device of a tensor."""
    if _described is not None:
        return _described
    return _read_target(device.index) if device.type == "cuda" else INTERPRETER


def sm_count(device: torch.device) -> int:
    """Number of multiprocessors."""
    return gpu_target(device).sm_count


@functools.cache
def _read_target(index: int | None) -> GpuTarget:
    found = torch.cuda.get_device_properties(index)
    return GpuTarget((found.major, found.minor), found.multi_processor_count)
