"""Compiler process: compiles GPU kernels beside an engine that starts.

usage: python -m quire.kernels.framework.compiler FOLDER, with a KernelCompileTask as JSON on stdin

The process starts early, so it has imported torch and Triton by the time the engine has found which
kernels are missing (quire.kernels.framework.kernel_precompile). It then forks compilers, which is
cheap because it is small and has no device. A fork of the engine itself cost ten seconds: every
page that either side wrote to afterwards had to be copied.
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
from quire.platform import bytecode_cache

log = logging.getLogger(__name__)

POLL_S = 0.03
PR_SET_PDEATHSIG = 1
MAX_KERNELS = 1 << 13
"""Kernel indices that fit in a pipe of 64 KiB."""
_INDEX = struct.Struct("<I")


class KernelSpec(msgspec.Struct, frozen=True):
    """A kernel's module and name, and the specialization to compile."""

    module: str
    name: str
    specialization: str


class KernelCompileTask(msgspec.Struct, frozen=True):
    """Kernels to compile for a target, the first `num_urgent` before all others."""

    target: tuple[str, int, int]  # backend, capability, threads of a warp
    kernels: tuple[KernelSpec, ...]
    num_urgent: int
    max_processes: int  # processes at a time


class CompilerProcess:
    """A child process that waits for one task. The owner sends the task, or stops the process."""

    def __init__(self, folder: Path) -> None:
        """folder: where Triton keeps what it compiles."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            env=env.child_environment(**bytecode_cache.child_variables()),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        """End the process, with or without a task."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()

    def compile_and_load(
        self, wanted: Sequence[MissingKernel], urgent: int, count: int, seconds: float
    ) -> list[MissingKernel]:
        """Have all kernels compiled into the folder, and load the first `urgent` when ready.

        The process compiles the others after this has returned, so late kernels are found in the
        folder. Returns: the urgent kernels that were not ready within `seconds`.
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
        with contextlib.suppress(OSError):  # the process has died: no kernel will be ready
            self._process.stdin.write(msgspec.json.encode(task))
            self._process.stdin.close()


def longest_first(wanted: Sequence[MissingKernel]) -> list[MissingKernel]:
    """Sort by length of source: long ones take long, and none of those should start last."""
    return sorted(wanted, key=lambda one: -len(one.function.src))


def _kernel_spec(wanted: MissingKernel) -> KernelSpec:
    function = wanted.function
    return KernelSpec(function.fn.__module__, function.fn.__name__, wanted.specialization)


# -- in the process ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Import all that compiling needs, wait for the task, and run it."""
    _exit_with_parent()
    logs.setup(env.read().log_level)
    (folder,) = argv
    kernel_precompile.set_cache_dir(Path(folder))
    kernel_precompile.compute_compiler_key()
    _import_gpu_kernels()
    task = sys.stdin.buffer.read()
    if task:
        run_task(msgspec.json.decode(task, type=KernelCompileTask))
    return 0


def _import_gpu_kernels() -> None:
    """Import every GPU kernel of quire, so that forked children have them."""
    package = importlib.import_module("quire.kernels.gpu")
    for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        with contextlib.suppress(ImportError):
            importlib.import_module(one.name)


def run_task(task: KernelCompileTask) -> None:
    """Compile all kernels in forked children; return when they have ended."""
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
    """Queue of kernels that the compilers share: a pipe that holds all their indices."""

    def __init__(self, task: KernelCompileTask) -> None:
        assert len(task.kernels) < MAX_KERNELS, len(task.kernels)  # they all fit in the pipe
        self._task = task
        self._fd, into = os.pipe()
        os.write(into, b"".join(_INDEX.pack(i) for i in range(len(task.kernels))))
        os.close(into)

    def close(self) -> None:
        os.close(self._fd)

    def compile_all(self) -> None:
        """In a child: compile until none is left; kernels that are not urgent at lower priority."""
        urgent = True
        while len(word := os.read(self._fd, _INDEX.size)) == _INDEX.size:
            (i,) = _INDEX.unpack(word)
            if urgent and i >= self._task.num_urgent:
                urgent = False
                os.nice(10)
            self._compile(self._task.kernels[i])

    def _compile(self, kernel: KernelSpec) -> None:
        began = time.monotonic()
        try:
            function = getattr(importlib.import_module(kernel.module), kernel.name)
            function.preload(kernel.specialization)
        except Exception:  # it fails again, and is reported, at its launch
            log.warning("kernel %s cannot be compiled ahead", kernel.name, exc_info=True)
        log.debug("%.2f s: %s", time.monotonic() - began, kernel.name)


def _fork_compiler(line: _CompileQueue, target: Any) -> int:
    """Fork a child that compiles from the queue and ends. Returns: its process id."""
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
    """Triton's driver, with the methods that compiling uses."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
