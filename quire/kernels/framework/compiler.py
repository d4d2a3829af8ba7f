"""Kernels compiled in processes of their own, beside an engine that starts.

usage: python -m quire.kernels.framework.compiler FOLDER, with a Task as JSON on standard input

Not here: which kernels (quire.kernels.framework.kernel_precompile). The one idea: the process is
begun early, so that it
has read torch and Triton when the engine knows what it lacks; it then forks compilers, which is
cheap because it is small and has no device. A fork of the engine itself cost it ten seconds: every
page that either wrote to afterwards had to be copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import pkgutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire import env
from quire import log as logs
from quire.kernels.framework import kernel_precompile
from quire.kernels.framework.kernel_precompile import MissingKernel

log = logging.getLogger(__name__)

POLL_S = 0.03
PR_SET_PDEATHSIG = 1
MAX_KERNELS = 1 << 13
"""Numbers that a pipe holds: it takes 64 KiB."""
_INDEX = struct.Struct("<I")


class KernelSpec(msgspec.Struct, frozen=True):
    """Where a kernel is found, and what it is to be compiled for."""

    module: str
    name: str
    specialization: str


class KernelCompileTask(msgspec.Struct, frozen=True):
    """What to compile for which target: the first `urgent` ones before all others."""

    target: tuple[str, int, int]  # backend, capability, threads of a warp
    kernels: tuple[KernelSpec, ...]
    num_urgent: int
    max_processes: int  # processes at a time


class CompilerProcess:
    """A process that waits for its task. Whoever began it asks or ends it."""

    def __init__(self, folder: Path) -> None:
        """folder: where Triton keeps what it compiles."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        """Nothing is to be compiled, or no more."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()

    def compile_and_load(
        self, wanted: Sequence[MissingKernel], urgent: int, count: int, seconds: float
    ) -> list[MissingKernel]:
        """Have all compiled into the folder, and load the first `urgent` as they come.

        The process goes on with the others after this has returned, so late kernels are found in
        the folder. Returns those of the urgent that did not come within `seconds`.
        """
        from triton.runtime import driver

        target = driver.active.get_current_target()
        pending = longest_first(wanted[:urgent])
        others = longest_first(wanted[urgent:])
        task = KernelCompileTask(
            (target.backend, target.arch, target.warp_size),
            tuple(_kernel_spec(one) for one in (*pending, *others)),
            urgent,
            count,
        )
        self._send_task(task)
        until = time.monotonic() + seconds
        while pending and time.monotonic() < until:
            ended = self._process.poll() is not None
            pending = kernel_precompile.load_cached(pending)
            if ended:
                break
            time.sleep(POLL_S)
        return pending

    def _send_task(self, task: KernelCompileTask) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: then nothing comes
            self._process.stdin.write(msgspec.json.encode(task))
            self._process.stdin.close()


def longest_first(wanted: Sequence[MissingKernel]) -> list[MissingKernel]:
    """In the order in which to begin: long sources take long, and none of those should be last."""
    return sorted(wanted, key=lambda one: -len(one.function.src))


def _kernel_spec(wanted: MissingKernel) -> KernelSpec:
    function = wanted.function
    return KernelSpec(function.fn.__module__, function.fn.__name__, wanted.specialization)


# -- in the process ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Read what compiling needs, wait for the task, and carry it out."""
    _exit_with_parent()
    logs.setup(env.read().log_level)
    (folder,) = argv
    kernel_precompile.set_cache_dir(Path(folder))
    kernel_precompile.compute_compiler_key()
    _import_gpu_kernels()
    said = sys.stdin.buffer.read()
    if said:
        run_task(msgspec.json.decode(said, type=KernelCompileTask))
    return 0


def _import_gpu_kernels() -> None:
    """Import every kernel of ours: children then have them all."""
    package = importlib.import_module("quire.kernels.gpu")
    for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        with contextlib.suppress(ImportError):
            importlib.import_module(one.name)


def run_task(task: KernelCompileTask) -> None:
    """Compile it all in forked children; returns when they have ended."""
    from triton.backends.compiler import GPUTarget

    began = time.monotonic()
    gc.collect()
    gc.freeze()
    line = _CompileQueue(task)
    children = [
        _fork_compiler(line, GPUTarget(*task.target))
        for _ in range(min(task.max_processes, len(task.kernels)))
    ]
    line.close()
    for pid in children:
        os.waitpid(pid, 0)
    log.debug("%d kernels compiled in %.2f s", len(task.kernels), time.monotonic() - began)


class _CompileQueue:
    """Kernels in the order in which compilers take them: a pipe that holds all their numbers."""

    def __init__(self, task: KernelCompileTask) -> None:
        assert len(task.kernels) < MAX_KERNELS, len(task.kernels)  # they all fit in the pipe
        self._task = task
        self._fd, into = os.pipe()
        os.write(into, b"".join(_INDEX.pack(i) for i in range(len(task.kernels))))
        os.close(into)

    def close(self) -> None:
        os.close(self._fd)

    def compile_all(self) -> None:
        """In a child: compile until none is left; what can wait with less haste."""
        hasty = True
        while len(word := os.read(self._fd, _INDEX.size)) == _INDEX.size:
            (i,) = _INDEX.unpack(word)
            if hasty and i >= self._task.num_urgent:
                hasty = False
                os.nice(10)
            self._compile(self._task.kernels[i])

    def _compile(self, kernel: KernelSpec) -> None:
        began = time.monotonic()
        try:
            function = getattr(importlib.import_module(kernel.module), kernel.name)
            function.preload(kernel.specialization)
        except Exception:  # it fails again, and tells, where it is used
            log.debug("%s does not compile ahead", kernel.name, exc_info=True)
        log.debug("%.2f s: %s", time.monotonic() - began, kernel.name)


def _fork_compiler(line: _CompileQueue, target: Any) -> int:
    """A child that compiles what it finds in the line, and ends; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        from triton.runtime import driver

        _exit_with_parent()
        driver.set_active(_FixedTargetDriver(target))
        line.compile_all()
    finally:
        os._exit(0)


def _exit_with_parent() -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _FixedTargetDriver:
    """Triton's driver as far as compiling asks for it."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
