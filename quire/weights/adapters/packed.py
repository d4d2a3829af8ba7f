"""Packs the tensors of an adapter into one buffer, from which a GPU copies them without the CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from quire.weights.adapters.adapter import Adapter, Delta, PackedTensors, tensors_of
from quire.weights.adapters.deltas import READERS

ALIGNMENT = 256
"""Bytes: each tensor begins at whole lines of any cache."""


def pack_adapter(adapter: Adapter, allocate: Callable[[int], Tensor]) -> Adapter:
    """Return the adapter with all tensors as views of one buffer, in the order of their names.

    allocate: returns so many bytes, uint8.
    """
    layout = hashlib.sha256()
    places: dict[int, tuple[int, Tensor]] = {}  # id of a tensor -> its place; parts may share one
    size = 0
    for layer in sorted(adapter.deltas):
        for part, delta in sorted(adapter.deltas[layer].items()):
            for name, tensor in tensors_of(delta):
                if id(tensor) not in places:
                    places[id(tensor)] = size, tensor
                    size += aligned(tensor.nbytes)
                at = places[id(tensor)][0]
                what = (layer, part, type(delta).__name__, name, at, tensor.dtype, *tensor.shape)
                layout.update(repr(what).encode())
    buffer = allocate(size)
    packed: dict[int, Tensor] = {}

    def copy(item: tuple[int, tuple[int, Tensor]]) -> None:
        key, (at, tensor) = item
        own = buffer[at : at + tensor.nbytes]
        if tensor.is_contiguous():  # in this thread, where torch would begin more (SERIAL)
            own.numpy()[:] = tensor.view(-1).view(torch.uint8).numpy()
        else:
            own.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        packed[key] = own.view(tensor.dtype).view(tensor.shape)

    with ThreadPoolExecutor(READERS, "pack-adapter") as pool:
        list(pool.map(copy, places.items()))

    def with_packed(delta: Delta) -> Delta:
        fields = {name: packed[id(tensor)] for name, tensor in tensors_of(delta)}
        return msgspec.structs.replace(delta, **fields)

    deltas = {
        layer: {part: with_packed(delta) for part, delta in parts.items()}
        for layer, parts in adapter.deltas.items()
    }
    return replace(
        adapter, deltas=deltas, nbytes=size, packed=PackedTensors(layout.digest(), buffer)
    )


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pinned_bytes(size: int) -> Tensor:
    """Memory that a GPU can read. Torch keeps what is freed for the next adapter."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
