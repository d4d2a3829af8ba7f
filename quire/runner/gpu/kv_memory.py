"""KV memory of a GPU: its tensors, the pinned host tensors behind them, and copies between both.

Copies are launched, and no call waits. A sleeping engine returns the GPU's part to the driver:
the tensors remain without storage; restored, they may have other addresses, so graphs are captured
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.types import BlockCopy
from quire.kernels.gpu.attention.block_copy import BlockCopyTable, copy_blocks
from quire.runner.gpu.staging_buffer import StagingBuffer


class KVMemory:
    """Owns the addresses; the attention backend uses the same tensors."""

    def __init__(
        self, cache: Sequence[Tensor], host_cache: Sequence[Tensor], device: torch.device
    ) -> None:
        self._cache, self._host_cache, self._device = cache, host_cache, device
        self._device_addresses = BlockCopyTable.build(cache, device)
        self._host_addresses = BlockCopyTable.build(host_cache, device)
        self._storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in cache)}
        self._released_sizes: dict[int, int] = {}  # of storages that were given back

    def swap_out(self, pairs: Sequence[BlockCopy], upload: StagingBuffer) -> None:
        """Copy blocks of the device to blocks of the host."""
        self._copy_between(self._device_addresses, self._host_addresses, pairs, upload)

    def swap_in(self, pairs: Sequence[BlockCopy], upload: StagingBuffer) -> None:
        """Copy blocks of the host to blocks of the device."""
        self._copy_between(self._host_addresses, self._device_addresses, pairs, upload)

    def copy(self, pairs: Sequence[BlockCopy], upload: StagingBuffer) -> None:
        """Copy blocks of the device; none is both read and written."""
        self._copy_between(self._device_addresses, self._device_addresses, pairs, upload)

    @staticmethod
    def _copy_between(
        source: BlockCopyTable,
        target: BlockCopyTable,
        pairs: Sequence[BlockCopy],
        upload: StagingBuffer,
    ) -> None:
        count = 2 * len(pairs)
        upload.acquire(count)[:count] = [block for pair in pairs for block in pair]
        upload.send(count)
        copy_blocks(source, target, upload.on_device[:count], len(pairs))

    @property
    def is_released(self) -> bool:
        return bool(self._released_sizes)

    def release(self) -> None:
        """Free the device's part. No step may be in flight."""
        for key, storage in self._storages.items():
            self._released_sizes[key] = storage.nbytes()
            storage.resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate it again; its content is lost."""
        for key, size in self._released_sizes.items():
            self._storages[key].resize_(size)
        self._released_sizes.clear()
        self._device_addresses = BlockCopyTable.build(self._cache, self._device)


def touch_memory(device: torch.device, *together: Sequence[int]) -> None:
    """Allocate pieces of these bytes, some together at a time, and give them back to torch."""
    for sizes in together:
        held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        del held
