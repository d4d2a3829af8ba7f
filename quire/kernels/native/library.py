"""Native library: loads the compiled CPU kernels, if there are any, and calls into them.

It is loaded at first use, once per process. A call packs its arguments as 8-byte fields (the
structs of the C++ side, in order) and runs them as a program of one op. While this thread records a
tape, the same bytes are also appended to it, and results come from the tape's arena.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire import env
from quire.kernels.framework import late_work
from quire.platform import cpu
from quire.platform.native_build import KERNELS, NativeBuildError

logger = logging.getLogger(__name__)

LINEAR, PACK, EMBEDDING, NORM, ROPE, MAP, WRITE, ATTENTION, MASK = range(9)
CODES_LINEAR, CODES_EMBEDDING, LORA, INT8_LINEAR, CODES_EXPERTS, LORA_ROWS = range(9, 15)
ROUTER, LOCAL_EXPERTS, COPY = range(15, 18)
CAUSAL_CONV, SSD_SCAN, SELECTIVE_SCAN, DELTA_RULE, GATED_NORM, GATE, PATCHES = range(18, 25)
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes the kernels take, by their code on the C++ side."""


class NativeLibrary:
    """A loaded library. `run` releases the interpreter lock while it computes."""

    def __init__(self, path: Path, threads: int) -> None:
        dll = ctypes.CDLL(str(path))
        dll.quire_threads.argtypes = [ctypes.c_long]
        dll.quire_features.restype = ctypes.c_char_p
        dll.quire_large_pages.argtypes = [ctypes.c_void_p, ctypes.c_long]
        dll.quire_check.argtypes = [ctypes.c_char_p, ctypes.c_long]
        dll.quire_check.restype = ctypes.c_long
        dll.quire_run.argtypes = [ctypes.c_char_p, ctypes.c_long]
        dll.quire_run.restype = None
        dll.quire_threads(threads)
        self.threads = threads
        self.features = dll.quire_features().decode()
        self.run = dll.quire_run
        self.check = dll.quire_check
        self.advise_huge_pages = dll.quire_large_pages


class OpRecording(Protocol):
    """The interface of a tape that is being recorded."""

    thread: int

    def append(self, step: bytes) -> None: ...

    def call(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor: ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


def address_of(tensor: Tensor | None) -> int:
    """Where a tensor's data is; 0: there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def empty_product(x: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor | None:
    """A new [T, O] for rows x [T, I] times a weight [O, I]. None: x or bias is not as kernels read
    them."""
    if x.dim() != 2 or x.stride(1) != 1 or (bias is not None and bias.dtype != x.dtype):
        return None
    outputs, expected = shape
    assert x.shape[1] == expected, f"x has {x.shape[1]} columns, the weight {expected}"
    return empty((x.shape[0], outputs), x.dtype)


def limit_threads(threads: int) -> None:
    """Load the library with at most so many threads: the other cores are for other ranks.

    Without effect once a kernel has run in this process: its threads exist.
    """
    global _max_threads
    _max_threads = threads


_max_threads: int | None = None


@functools.cache
def load_library() -> NativeLibrary | None:
    """The library, built and loaded by the first call; None if it is unavailable."""
    settings = env.read()
    if settings.cpu_isa == "none":
        return None
    began = time.perf_counter()
    try:
        with late_work.preparing():
            path = KERNELS.find_or_build(settings.cache_dir, settings.cpu_isa)
        threads = settings.num_threads or cpu.available_cores()
        library = NativeLibrary(path, min(threads, _max_threads or threads))
    except (NativeBuildError, OSError) as e:  # OSError: the loader refuses the file
        logger.warning(
            "no native CPU kernels: PyTorch references run instead, and decoding is many times "
            "slower. %s (QUIRE_CPU_ISA=none chooses the references without this warning)",
            e,
        )
        return None
    late_work.note_kernel("library of the CPU", time.perf_counter() - began)
    return library


def available() -> bool:
    """Whether there are compiled kernels; the first call builds and loads them."""
    return load_library() is not None


active_recording: OpRecording | None = None
"""The tape being recorded, if any. Written by quire.kernels.native.op_tape only."""


def thread_recording() -> OpRecording | None:
    """The tape that this thread records."""
    if active_recording is not None and active_recording.thread == threading.get_ident():
        return active_recording
    return None


class NativeOp:
    """One op of the library: `NativeOp(NORM, "qqd")(pointer, size, eps)` packs and runs it.

    While a tape is recorded it is only packed: replaying the tape runs it.
    """

    def __init__(self, op: int, fields: str) -> None:
        self._struct = struct.Struct("=qq" + fields)
        self._head = (op, 8 * len(fields))

    def __call__(self, *args: float) -> None:
        step = self._struct.pack(*self._head, *args)
        if active_recording is not None and (tape := thread_recording()) is not None:
            tape.append(step)
            return
        found = load_library()
        assert found is not None, "a native op was called without the native library"
        found.run(step, len(step))


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new uninitialised tensor for a result: ordinary memory, or the arena while recording."""
    if active_recording is not None and (tape := thread_recording()) is not None:
        return tape.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


def empty_huge_pages(count: int, dtype: torch.dtype) -> Tensor:
    """A new flat tensor on huge pages if the system has them, for weights that are streamed."""
    data = torch.empty(count, dtype=dtype)
    found = load_library()
    if found is not None:
        found.advise_huge_pages(data.data_ptr(), data.nbytes)
    return data
