"""The KV tensors of a GPU, the pinned ones behind them, and block copies between the two.

Everything is launched, nothing waits. A sleeping engine gives the GPU's part back to the driver:
the tensors stay, their storage goes; restored, it may lie elsewhere, so graphs must be made anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.types import Copy
from quire.kernels.gpu.place_copy import Places, copy_blocks
from quire.runner.upload import Upload


class KVMemory:
    """Owns nothing but the addresses: the tensors are the backend's as well."""

    def __init__(
        self, cache: Sequence[Tensor], host_cache: Sequence[Tensor], device: torch.device
    ) -> None:
        self._cache, self._host_cache, self._device = cache, host_cache, device
        self._on_device = Places.of(cache, device)
        self._on_host = Places.of(host_cache, device)
        self._storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in cache)}
        self._sizes: dict[int, int] = {}  # of storages that were given back

    def swap_out(self, pairs: Sequence[Copy], upload: Upload) -> None:
        """Blocks of the device to blocks of the host."""
        self._copy(self._on_device, self._on_host, pairs, upload)

    def swap_in(self, pairs: Sequence[Copy], upload: Upload) -> None:
        """Blocks of the host to blocks of the device."""
        self._copy(self._on_host, self._on_device, pairs, upload)

    def copy(self, pairs: Sequence[Copy], upload: Upload) -> None:
        """Blocks of the device; none is both read and written."""
        self._copy(self._on_device, self._on_device, pairs, upload)

    @staticmethod
    def _copy(source: Places, target: Places, pairs: Sequence[Copy], upload: Upload) -> None:
        count = 2 * len(pairs)
        upload.take(count)[:count] = [block for pair in pairs for block in pair]
        upload.send(count)
        copy_blocks(source, target, upload.on_device[:count], len(pairs))

    @property
    def given_back(self) -> bool:
        return bool(self._sizes)

    def give_back(self) -> None:
        """Free the device's part. Nothing may be under way that uses it."""
        for key, storage in self._storages.items():
            self._sizes[key] = storage.nbytes()
            storage.resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate it again; what it held is gone."""
        for key, size in self._sizes.items():
            self._storages[key].resize_(size)
        self._sizes.clear()
        self._on_device = Places.of(self._cache, self._device)
