"""Copies of small tensors to the device and back, without waiting.

A GPU copies asynchronously from and to pinned memory only. Torch's pool reuses pinned memory only
when the copies that use it are done, so nothing here needs an event of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[list[int]] | np.ndarray, device: torch.device
) -> Tensor:
    """Values on the device: int64 or float32 from a sequence, an array's own type."""
    made = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
    return move_tensor(made, device)


def bytes_to_device(
    data: bytes, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> Tensor:
    """A tensor on the device of bytes in its own memory, which are copied once on the host."""
    made = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    if made.numel():
        made.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return made.to(device, non_blocking=True)


def move_tensor(values: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, wherever it was."""
    if values.device.type == device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)


def to_host_async(values: Tensor) -> Tensor:
    """A host tensor that will hold the values once the device's stream has come this far."""
    if values.is_cpu:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
