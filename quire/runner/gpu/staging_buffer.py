"""Staging buffer: uploads small integers to the device without waiting.

A GPU copies asynchronously from pinned memory only, and reads it when the stream reaches the copy:
until then the host must not write there. So each upload has a few pinned buffers that are used in
turn, each with an event that marks the read; with steps in flight + 1 of them no upload waits. All
copies go to one device buffer, which the stream's order protects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]

ALIGNMENT = 32
"""Words: sections begin at whole cache lines, so every view is aligned alike for the kernels."""


def align_words(words: int) -> int:
    return -(-words // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class _PinnedBuffer:
    tensor: Tensor
    array: Ints
    copied: torch.cuda.Event


class StagingBuffer:
    """One device buffer of int32 words. `acquire`, write, `send`, in turn."""

    def __init__(self, words: int, depth: int, device: torch.device) -> None:
        """words: grows on demand, but then views of `on_device` made before are stale."""
        self._depth = depth
        self._index = 0
        self._allocate(align_words(words), device)

    def acquire(self, words: int) -> Ints:
        """Return a host buffer of at least so many words that may be written now."""
        if words > len(self.on_device):
            self._allocate(align_words(2 * words), self.on_device.device)
        self._index = (self._index + 1) % self._depth
        buffer = self._ring[self._index]
        buffer.copied.synchronize()
        return buffer.array

    def send(self, words: int) -> None:
        """Copy the first words of the acquired buffer to `on_device`."""
        buffer = self._ring[self._index]
        self.on_device[:words].copy_(buffer.tensor[:words], non_blocking=True)
        buffer.copied.record()

    def _allocate(self, words: int, device: torch.device) -> None:
        self.on_device = torch.empty(words, dtype=torch.int32, device=device)
        self._ring = [_make_buffer(words) for _ in range(self._depth)]


def pinned_words(words: int) -> Tensor:
    """Allocate host memory that the device can read and write."""
    return torch.empty(words, dtype=torch.int32, pin_memory=True)


def _make_buffer(words: int) -> _PinnedBuffer:
    tensor = pinned_words(words)
    return _PinnedBuffer(tensor, tensor.numpy(), torch.cuda.Event())
