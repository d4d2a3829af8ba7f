"""Copies tensors from mapped files to a GPU at the speed of the bus.

The copy engine of a device cannot read a file's pages, but it can read pinned memory. So several
threads fill pinned buffers from the pages (which is when they are read), and each sends one buffer
while it fills the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.platform import cpu

BUFFER_BYTES = 16 * 2**20
"""Bytes per buffer: large enough for full bus speed, small enough that 32 are soon allocated."""
SYNC_COPY_BYTES = 2**18
"""Not worth a thread."""
MAX_THREADS = 16

CudaEvent = torch.cuda.Event


@dataclass  # no slots: those would be shared between threads
class _CopyStream(threading.local):
    """What one thread owns: a stream, and two buffers with the events after their copies."""

    stream: torch.cuda.Stream | None = None
    buffers: list[Tensor] = field(default_factory=list)
    copied: list[CudaEvent] = field(default_factory=list)
    index: int = 0


class GpuLoader:
    """Threads between files and one GPU. A context: leaving waits for running copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        threads = min(MAX_THREADS, cpu.available_cores())
        self._pool = ThreadPoolExecutor(
            threads, "quire-weights", initializer=torch.cuda.set_device, initargs=(device,)
        )  # or calls of the runtime open a context on the first GPU
        self._copy_stream = _CopyStream()

    def __enter__(self) -> GpuLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def copy(self, target: Tensor, source: Tensor) -> list[Future[CudaEvent]]:
        """Copy source (on the CPU) to target (contiguous, on the GPU), converting its dtype.

        Returns what to wait for before target is read. source must stay as it is till then.
        """
        if target.nbytes <= SYNC_COPY_BYTES:
            target.copy_(source)
            return []
        ready = CudaEvent()
        ready.record()  # target's memory may still be read by what was queued before
        pairs = _split_pieces(target, source)
        return [self._pool.submit(self._copy_piece, one, piece, ready) for one, piece in pairs]

    def wait(self, copies: list[Future[CudaEvent]]) -> None:
        """Make the current stream wait for these copies. Raises what they raised."""
        stream = torch.cuda.current_stream(self._device)
        for copy in copies:
            stream.wait_event(copy.result())

    def _copy_piece(self, target: Tensor, source: Tensor, ready: CudaEvent) -> CudaEvent:
        """One piece, in a thread of the pool."""
        own = self._copy_stream
        if own.stream is None:
            own.stream = torch.cuda.Stream(self._device)
            own.buffers = [
                torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in "12"
            ]
            own.copied = [CudaEvent() for _ in own.buffers]
        own.index = 1 - own.index
        own.copied[own.index].synchronize()
        turned = _is_turned(source, target.dtype)
        shape = target.shape[::-1] if turned else target.shape
        part = own.buffers[own.index][: target.nbytes].view(target.dtype).view(shape)
        _copy_to_pinned(part, source.t() if turned else source)
        with torch.cuda.stream(own.stream):
            own.stream.wait_event(ready)
            if turned:
                part = part.to(self._device, non_blocking=True).t()
            target.copy_(part, non_blocking=True)
            own.copied[own.index].record()
            done = CudaEvent()
            done.record()
        return done


def _split_pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Matching runs of rows that fit in a buffer; rows that do not are cut themselves."""
    if target.nbytes <= BUFFER_BYTES:
        yield target, source
    elif target.shape[0] == 1:
        yield from _split_pieces(target[0], source[0])
    else:
        rows = max(BUFFER_BYTES * target.shape[0] // target.nbytes, 1)
        for one, piece in zip(target.split(rows), source.split(rows), strict=True):
            yield from _split_pieces(one, piece)


def _is_turned(source: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor is the transpose of runs of memory.

    The GPU turns it: a thread of the host turns a sixth of the bytes that it copies.
    """
    alike = source.dim() == 2 and source.dtype == dtype
    return alike and source.stride(0) == 1 < source.stride(1) and min(source.shape) > 1


def _copy_to_pinned(part: Tensor, source: Tensor) -> None:
    """Without torch's own threads where bytes are just copied: the pool has enough."""
    if source.dtype == part.dtype and source.stride(-1) == 1:
        np.copyto(part.view(torch.uint8).numpy(), source.detach().view(torch.uint8).numpy())
    else:
        part.copy_(source)
