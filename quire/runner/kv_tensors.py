"""KV tensors of one device: allocates one per place, [N, 2, K, B, D], or [N, 1, 1, B, D] where
values are part of the keys. With scales per token it is memory: [N, 2, K, bytes of a head].

On the CPU they are zero pages that cost nothing until written, so a large pool is free until used;
they are returned to the system when an idle engine sleeps. On a GPU they are views of one
allocation without defined content: kernels read only what was written.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from quire.config.memory.kv_format import KVFormat
from quire.config.memory.kv_layout import KVCacheGroup, LayerFacts, place_layers
from quire.kernels.native import library


def allocate_kv_tensors(
    layers: Seq[LayerFacts],
    groups: Seq[KVCacheGroup],
    *,
    num_blocks: int,
    block_size: int,
    form: KVFormat,
    device: torch.device | None = None,
    pinned: bool = False,
) -> list[Tensor]:
    """Allocate one tensor per place. The layers of one place agree in shape (by group_layers).

    Without groups there is no place. num_blocks may be 0 (no host tier): tensors of no blocks.
    pinned: host memory a GPU can copy from and to while it computes.
    """
    dtype = torch.uint8 if form.per_token else getattr(torch, form.dtype)
    shapes = []
    for layer in place_layers(layers, groups):
        head = [block_size, layer.head_dim]
        if form.per_token:
            head = [form.head_bytes(layer.head_dim, block_size)]
        shapes.append((num_blocks, layer.planes, layer.kv_heads, *head))
    if device is None or device.type == "cpu":
        make = _pinned_tensor if pinned and num_blocks else _zero_page_tensor
        return [make(shape, dtype) for shape in shapes]
    return _device_tensors(shapes, dtype, device)


def _device_tensors(
    shapes: Seq[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Allocate tensors end to end: one call of the driver, whatever the layers."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    pieces = torch.split(whole, sizes)
    return [piece.view(dtype).view(shape) for piece, shape in zip(pieces, shapes)]


def _pinned_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def release_pages(tensors: Seq[Tensor]) -> None:
    """Return host memory of KV tensors to the system. They stay usable; their content is lost."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.is_pinned():
            continue  # never returned: no other process uses the device's memory while quire runs
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE
        size = last * mmap.PAGESIZE - first
        if size <= 0 or not _madvise_dont_need(first, size):
            tensor.zero_()


def _madvise_dont_need(address: int, size: int) -> bool:
    """Drop private anonymous pages; False where the system cannot."""
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(address, size, advice) == 0)


def _zero_page_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed CPU tensor whose (large) pages the system hands out at the first write (calloc)."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = math.prod(shape) * dtype.itemsize
    flat = torch.from_numpy(np.zeros(count, dtype=np.uint8))
    native = library.load_library()
    if native is not None:
        native.advise_huge_pages(flat.data_ptr(), flat.nbytes)
    return flat.view(dtype).view(shape)
