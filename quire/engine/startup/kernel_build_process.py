"""Kernel build process: finds the GPU kernels of an engine and compiles them, beside its start.

usage: python -m quire.engine.startup.kernel_build_process, with a KernelBuildTask as JSON on stdin;
it writes one KernelBuildProgress per line

It has no device of its own. Compilers are forked from it, which is cheap because it is small: a
fork of the engine itself cost ten seconds, as every page that either side wrote to afterwards had
to be copied.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire import env
from quire import log as logs
from quire.config.options import Options
from quire.engine.startup.kernel_builder import (
    KernelBuildProgress,
    KernelBuildTask,
    write_manifest,
)
from quire.engine.startup.kernel_enumeration import enumerate_kernels
from quire.engine.startup.model_setup import describe_model
from quire.kernels.framework import kernel_precompile
from quire.kernels.framework.kernel_spec import KernelSpec
from quire.kernels.gpu.runtime.target import GpuTarget
from quire.sandbox.parent_death import exit_with_parent


def main() -> int:
    """Import all that compiling needs, wait for the task, and run it."""
    exit_with_parent()
    logs.setup(env.read().log_level)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not be taken for progress
    kernel_precompile.compute_compiler_key()
    kernel_precompile.import_gpu_kernels()
    given = sys.stdin.buffer.read()
    if not given:
        return 0
    task = msgspec.json.decode(given, type=KernelBuildTask)
    with contextlib.suppress(BrokenPipeError):  # the engine's start failed
        for progress in build(task):
            out.write(msgspec.json.encode(progress) + b"\n")
            out.flush()
    return 0


def build(task: KernelBuildTask) -> Iterator[KernelBuildProgress]:
    """Find and compile the kernels of a task, and write its manifest.

    Yields: each kernel when it is in the folder, and at the end an item without one, if none has
    failed.
    """
    kernel_precompile.set_cache_dir(Path(task.folder))
    target = GpuTarget(task.capability, task.sm_count)
    compilers = kernel_precompile.KernelCompilers(
        target, task.max_processes, launchers=task.launchers
    )
    found = describe_model(Options.from_flat(task.options), env.read())
    kernels: list[KernelSpec] = []

    def note(kernel: KernelSpec) -> None:
        kernels.append(kernel)
        compilers.add(kernel)

    enumerate_kernels(found, task.config, target, note, peers=task.peers)
    count = 0
    for one in compilers.results():
        count += 1
        yield KernelBuildProgress(len(kernels), one)
    if count == len(kernels):
        write_manifest(Path(task.manifest), kernels)
        yield KernelBuildProgress(len(kernels))


if __name__ == "__main__":
    sys.exit(main())
