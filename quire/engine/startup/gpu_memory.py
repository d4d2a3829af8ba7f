"""Memory of a rank's GPU: what is in use, and the return of what is not."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from quire.platform import cuda


class DeviceUse(NamedTuple):
    """Bytes of the GPU of one rank."""

    free: int
    allocated: int  # by torch, for this engine
    spare: int  # that torch holds free
    overhead: int  # of the driver and the libraries; nonsense if other processes come and go


def measure_device(device: torch.device, held: int = 0) -> DeviceUse:
    """Return the use of a device now. held: bytes that torch has allocated for other engines."""
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    own = cuda.own_memory_bytes(device.index)
    if own is None:
        before = cuda.device_properties(device.index)  # as this process found it
        own = total - free - (before.total_bytes - before.free_bytes)
    return DeviceUse(free, allocated - held, reserved - allocated, own - reserved)


def free_device_memory(device: torch.device, *, others: bool = False) -> None:
    """Return the memory of dropped engine parts to the driver, so that the cache can be one
    piece.

    others: other engines of this process may have graphs, which use cuBLAS's workspaces.
    """
    gc.collect()
    torch.cuda.synchronize(device)
    if not others:
        torch._C._cuda_clearCublasWorkspaces()  # one per stream
    torch.cuda.empty_cache()
