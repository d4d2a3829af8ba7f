"""Small integers on their way to the device, without anyone waiting.

A GPU copies asynchronously from pinned memory only, and reads it when the stream comes to the copy:
until then the host must not write there. So each upload has a few pinned buffers that are used in
turn, each with an event that tells when it was read; with steps in flight + 1 of them nobody waits.
All go to one device buffer, which the stream's order protects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]

GRAIN = 32
"""Words: sections begin at whole cache lines, so every view is aligned alike for the kernels."""


def aligned(words: int) -> int:
    return -(-words // GRAIN) * GRAIN


@dataclass(slots=True)
class _Pinned:
    tensor: Tensor
    array: Ints
    sent: torch.cuda.Event


class Upload:
    """One device buffer of int32 words. `take`, write, `send`, in turn."""

    def __init__(self, words: int, depth: int, device: torch.device) -> None:
        """words: grows on demand, but then views of `on_device` made before are stale."""
        self._depth = depth
        self._next = 0
        self._allocate(aligned(words), device)

    def take(self, words: int) -> Ints:
        """A host buffer of at least so many words that may be written now."""
        if words > len(self.on_device):
            self._allocate(aligned(2 * words), self.on_device.device)
        self._next = (self._next + 1) % self._depth
        buffer = self._ring[self._next]
        buffer.sent.synchronize()
        return buffer.array

    def send(self, words: int) -> None:
        """Copy the first words of what take() gave to `on_device`."""
        buffer = self._ring[self._next]
        self.on_device[:words].copy_(buffer.tensor[:words], non_blocking=True)
        buffer.sent.record()

    def _allocate(self, words: int, device: torch.device) -> None:
        self.on_device = torch.empty(words, dtype=torch.int32, device=device)
        self._ring = [_buffer(words) for _ in range(self._depth)]


def pinned(words: int) -> Tensor:
    """Host memory that the device can read and write by itself."""
    return torch.empty(words, dtype=torch.int32, pin_memory=True)


def _buffer(words: int) -> _Pinned:
    tensor = pinned(words)
    return _Pinned(tensor, tensor.numpy(), torch.cuda.Event())
