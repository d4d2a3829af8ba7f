"""The memory of an adapter: one buffer with all its tensors, which a GPU copies without the CPU."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from quire.weights.adapters.adapter import Adapter, Delta, PackedTensors, tensors_of

ALIGNMENT = 256
"""Bytes: each tensor begins at whole lines of any cache."""

READERS = 4
"""Threads that read, convert, hash and copy, mostly without the interpreter's lock. More wait for
it longer than they save."""

Allocate = Callable[[int], Tensor]
"""Returns so many bytes, uint8."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSpec:
    """A tensor that is to be filled. Parts may share one."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Named = Mapping[str, Tensor | TensorSpec]
"""The tensors of a delta, by field."""


class PackedLayout:
    """Where tensors are in one buffer: side by side in the order in which they were added."""

    def __init__(self) -> None:
        self.size = 0
        self._places: dict[int, tuple[int, Tensor | TensorSpec]] = {}  # by id: parts may share one
        self._hash = hashlib.sha256()

    def add(self, layer: str, part: int, kind: type, tensors: Named) -> None:
        for name, tensor in tensors.items():
            if id(tensor) not in self._places:
                self._places[id(tensor)] = self.size, tensor
                self.size += aligned(tensor.nbytes)
            at = self._places[id(tensor)][0]
            what = (layer, part, kind.__name__, name, at, tensor.dtype, *tensor.shape)
            self._hash.update(repr(what).encode())

    def place(self, tensor: Tensor | TensorSpec) -> int:
        """The byte at which a tensor begins."""
        return self._places[id(tensor)][0]

    def entries(self) -> Iterable[tuple[int, Tensor | TensorSpec]]:
        """Each tensor once, with the byte at which it begins."""
        return self._places.values()

    def view(self, buffer: Tensor, tensor: Tensor | TensorSpec) -> Tensor:
        at = self.place(tensor)
        return buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def digest(self) -> bytes:
        """Equal digests mean the same tensors at the same places."""
        return self._hash.digest()


def pack_adapter(adapter: Adapter, allocate: Allocate) -> Adapter:
    """Return the adapter with all tensors as views of one buffer, in the order of their names."""
    layout = PackedLayout()
    for layer in sorted(adapter.deltas):
        for part, delta in sorted(adapter.deltas[layer].items()):
            layout.add(layer, part, type(delta), dict(tensors_of(delta)))
    buffer = allocate(layout.size)
    packed: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> None:
        own = layout.view(buffer, tensor)
        if tensor.is_contiguous():  # in this thread: torch would begin more (fill.SERIAL)
            bytes_of(own)[:] = bytes_of(tensor)
        else:
            own.copy_(tensor)
        packed[id(tensor)] = own

    with ThreadPoolExecutor(READERS, "pack-adapter") as pool:
        list(pool.map(copy, (tensor for _, tensor in layout.entries())))

    def with_packed(delta: Delta) -> Delta:
        fields = {name: packed[id(tensor)] for name, tensor in tensors_of(delta)}
        return msgspec.structs.replace(delta, **fields)

    deltas = {
        layer: {part: with_packed(delta) for part, delta in parts.items()}
        for layer, parts in adapter.deltas.items()
    }
    made = PackedTensors(layout.digest(), buffer)
    return replace(adapter, deltas=deltas, nbytes=layout.size, packed=made)


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, [n] uint8, as a view for NumPy."""
    return tensor.view(-1).view(torch.uint8).numpy()


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plain_bytes(size: int) -> Tensor:
    """Memory of the CPU."""
    return torch.empty(size, dtype=torch.uint8)


def pinned_bytes(size: int) -> Tensor:
    """Memory that a GPU can read. Torch keeps what is freed for the next adapter."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
