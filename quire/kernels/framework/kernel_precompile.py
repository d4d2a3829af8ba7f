"""Kernel precompilation: compiles GPU kernels ahead in other processes, and loads them.

quire.kernels.framework.meta_device finds the kernels that an engine needs; platform.kernel_store
lays out the folder of compiled kernels.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pkgutil
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from quire.kernels.framework.kernel_spec import KernelSpec
from quire.kernels.framework.meta_device import set_triton_target
from quire.kernels.gpu.runtime.target import GpuTarget
from quire.platform import cpu
from quire.sandbox.parent_death import exit_with_parent

log = logging.getLogger(__name__)

MAX_LAUNCHER_BUILDS = 16
"""Launchers that are built at a time."""
_INDEX = struct.Struct("<I")
_ENTRY = struct.Struct("<III")  # index, and where its spec is in the file


def set_cache_dir(cache_dir: Path) -> None:
    """Make Triton keep compiled kernels in the folder. Call before the first kernel."""
    from triton import knobs

    knobs.cache.dir = str(cache_dir)
    knobs.compilation.store_binary_only = True  # no start reads the stages before it


def compute_compiler_key() -> None:
    """Compute the part of Triton's cache keys that identifies the compiler: it reads 400 MB."""
    from triton.runtime import cache

    key = getattr(cache, "triton_key", None)
    if key is not None:
        key()


class _NotCached(Exception):
    """Raised where a kernel is not in the folder."""


class _NoLauncher(Exception):
    """Raised where the C function that starts a kernel is not in the folder."""


def load_cached(kernels: Sequence[KernelSpec]) -> list[KernelSpec]:
    """Load the kernels that the folder holds, ready to launch. Returns: the others.

    Launchers that are missing are built: archives of kernels have none.
    """
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class CachedKernelsOnly(FileCacheManager):
        def get_group(self, filename: str) -> Any:
            found = super().get_group(filename)
            if not found:
                raise _NotCached
            return found

        def get_file(self, filename: str) -> Any:
            found = super().get_file(filename)
            if not found and filename.startswith("__triton_launcher"):
                raise _NoLauncher
            return found

    before, missing, without_launcher = knobs.cache.manager_class, [], []
    knobs.cache.manager_class = CachedKernelsOnly
    try:
        for one in kernels:
            try:
                _compile(one)._init_handles()
            except _NotCached:
                missing.append(one)
            except _NoLauncher:
                without_launcher.append(one)
    finally:
        knobs.cache.manager_class = before
    if without_launcher:  # a C compiler runs a fifth of a second for each
        import torch

        threads, device = (
            min(MAX_LAUNCHER_BUILDS, cpu.available_cores()),
            torch.cuda.current_device(),
        )
        with ThreadPoolExecutor(
            threads, initializer=torch.cuda.set_device, initargs=(device,)
        ) as pool:
            list(pool.map(lambda one: _compile(one)._init_handles(), without_launcher))
    return missing


def _compile(kernel: KernelSpec) -> Any:
    """Compile the kernel, or read it from the folder. Returns: Triton's CompiledKernel."""
    function = getattr(importlib.import_module(kernel.module), kernel.name)
    return function.preload(kernel.specialization)


# -- in a process that only compiles ----------------------------------------------------------


def import_gpu_kernels() -> None:
    """Import every GPU kernel of quire, so that forked children have them."""
    package = importlib.import_module("quire.kernels.gpu")
    for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        with contextlib.suppress(ImportError):
            importlib.import_module(one.name)


class KernelCompilers:
    """Forked processes that compile kernels into the folder, beside the process that finds them."""

    def __init__(self, target: GpuTarget, count: int, *, launchers: bool) -> None:
        """count: of processes. launchers: they also build the C functions that start the kernels,
        which needs the driver's library."""
        # specs are larger than what a pipe writes at once
        self._specs = tempfile.TemporaryFile()  # noqa: SIM115 - open until the process ends
        self._found: list[KernelSpec] = []
        self._with_launchers = launchers
        self._queue, self._into_queue = os.pipe()
        self._done, self._into_done = os.pipe()
        gc.collect()
        gc.freeze()
        self._children = [self._fork(target) for _ in range(count)]
        os.close(self._queue)
        os.close(self._into_done)

    def add(self, kernel: KernelSpec) -> None:
        """Have a kernel compiled."""
        data, start = msgspec.json.encode(kernel), self._specs.tell()
        self._specs.write(data)
        self._specs.flush()
        with contextlib.suppress(BrokenPipeError):  # all children have died: results() is empty
            os.write(self._into_queue, _ENTRY.pack(len(self._found), start, len(data)))
        self._found.append(kernel)

    def results(self) -> Iterator[KernelSpec]:
        """Yield the kernels as they are in the folder; those that cannot be compiled are left out.

        Nothing is added after this. Raises RuntimeError at the end if a process was killed.
        """
        os.close(self._into_queue)
        while len(word := os.read(self._done, _INDEX.size)) == _INDEX.size:
            yield self._found[_INDEX.unpack(word)[0]]
        os.close(self._done)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._children]
        if any(ends):
            raise RuntimeError(f"processes that compile GPU kernels ended with status {ends}")

    def _fork(self, target: GpuTarget) -> int:
        """Fork a child that compiles until the queue ends. Returns: its process id."""
        pid = os.fork()
        if pid:
            return pid
        try:
            exit_with_parent()
            os.close(self._into_queue)
            os.close(self._done)
            set_triton_target(target)
            self._compile_all()
            os._exit(0)
        except BaseException:
            log.warning("a process that compiles GPU kernels failed", exc_info=True)
        finally:
            os._exit(1)

    def _compile_all(self) -> None:
        while len(entry := os.read(self._queue, _ENTRY.size)) == _ENTRY.size:
            index, start, size = _ENTRY.unpack(entry)
            data = os.pread(self._specs.fileno(), size, start)
            kernel = msgspec.json.decode(data, type=KernelSpec)
            began = time.monotonic()
            try:
                compiled = _compile(kernel)
                if self._with_launchers:
                    _build_launcher(compiled)
            except Exception:  # it fails again, and is reported, at its launch
                log.warning("kernel %s cannot be compiled ahead", kernel.label, exc_info=True)
                continue
            log.debug("%.2f s: %s", time.monotonic() - began, kernel.label)
            os.write(self._into_done, _INDEX.pack(index))


def _build_launcher(compiled: Any) -> None:
    """Build the C function that starts a kernel: one for each signature, a fifth of a second."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)
