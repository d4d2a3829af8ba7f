"""Kernel builder: has every GPU kernel of an engine compiled and loaded before it is ready.

    known start     the folder of kernels has a manifest for this model, config, GPU and code: its
                    kernels are loaded, and no other process starts
    other starts    a process finds the kernels (kernel_enumeration) and compiles those that the
                    folder lacks, while this process loads the weights; then it writes the manifest

Imports neither torch nor Triton before kernels are loaded, so that the process can start early.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from quire import env
from quire.config.engine_config import EngineConfig
from quire.kernels.framework.kernel_spec import KernelSpec
from quire.platform import bytecode_cache, cpu
from quire.platform.kernel_store import MANIFESTS, write_whole

log = logging.getLogger(__name__)

MAX_COMPILERS = 16
"""Maximum of processes that compile."""
PROGRESS_S = 5.0
"""Seconds between two log lines while kernels compile."""
MODULE = "quire.engine.startup.kernel_build_process"
KERNEL_PACKAGE = "quire.kernels.gpu."
SOURCES = (
    "attention",
    "engine/startup",
    "kernels",
    "layers",
    "models",
    "quant",
    "runner",
    "sampling",
)
"""Packages whose code decides which kernels an engine needs."""


class KernelBuildTask(msgspec.Struct, frozen=True):
    """What the kernel build process is to do."""

    config: EngineConfig
    options: dict[str, Any]  # flat: those that differ from the defaults
    capability: tuple[int, int]
    sm_count: int
    folder: str  # of compiled kernels
    manifest: str  # the file to write
    max_processes: int
    launchers: bool = True  # also build the C functions that start kernels: they need a driver


class KernelBuildProgress(msgspec.Struct, frozen=True):
    """From the process: a kernel that is ready to load, of `total`; None: all are ready."""

    total: int
    kernel: KernelSpec | None = None


class KernelBuildProcess:
    """The process that finds and compiles kernels; it imports all it needs before it has a task."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            env=env.child_environment(**bytecode_cache.child_variables()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        weakref.finalize(self, self._process.kill)  # a start that failed: its results are not read

    def send(self, task: KernelBuildTask) -> None:
        """Start the work. The process ends after it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: receive() ends at once
            self._process.stdin.write(msgspec.json.encode(task))
            self._process.stdin.close()

    def receive(self) -> Iterator[KernelBuildProgress]:
        """Yield kernels as they are ready; the last item has none. It is absent after a failure."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield msgspec.json.decode(line, type=KernelBuildProgress)
        self._process.wait()

    def stop(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.kill()
        self._process.wait()


_early_process: KernelBuildProcess | None = None


def start_early_process(cache_dir: Path) -> None:
    """Start the process that the next KernelBuilder will need, if that is plain: on a machine with
    a GPU and no compiled kernels. It imports for seconds, while this process does the same."""
    global _early_process
    try:
        kept = any((cache_dir / "kernels").glob(f"triton-{version('triton')}-*/{MANIFESTS}/*"))
    except PackageNotFoundError:
        return
    if _early_process is None and not kept and Path("/dev/nvidiactl").exists():
        _early_process = KernelBuildProcess()


def stop_early_process() -> None:
    """End the process, if no KernelBuilder has needed it."""
    global _early_process
    if _early_process is not None:
        _early_process.stop()
        _early_process = None


class KernelBuilder:
    """The kernels of one engine. Make it early, and load() when the device is open."""

    def __init__(self, task: KernelBuildTask) -> None:
        """Read the manifest, or have a process find the kernels."""
        self._task = task
        self._process: KernelBuildProcess | None = None
        self._known = read_manifest(Path(task.manifest))
        if self._known is None:
            self._start_process()

    def load(self) -> int:
        """Load every kernel, as they get ready. Returns: how many. The device must be open."""
        from quire.kernels.framework.kernel_precompile import load_cached

        if self._known is not None:
            if not load_cached(self._known):
                return len(self._known)
            log.info("the folder of kernels lacks some of its manifest: %s", self._task.folder)
            self._start_process()
        count, reported, complete = 0, time.monotonic(), False
        assert self._process is not None
        for progress in self._process.receive():
            if progress.kernel is None:
                complete = True
                continue
            load_cached([progress.kernel])
            count += 1
            if time.monotonic() - reported > PROGRESS_S:
                reported = time.monotonic()
                log.info("compiling GPU kernels: %d of %d", count, progress.total)
        if not complete:
            log.warning(
                "not all GPU kernels could be compiled ahead (the lines above say why): the others "
                "compile in the first step that needs them"
            )
        return count

    @property
    def memory_record(self) -> Path:
        """The file of quire.engine.startup.memory_record for this engine."""
        return Path(self._task.manifest).with_suffix(".memory.json")

    def _start_process(self) -> None:
        global _early_process
        self._process = _early_process or KernelBuildProcess()
        _early_process = None
        self._process.send(self._task)


def build_task(
    config: EngineConfig,
    options: dict[str, Any],
    model_config: object,
    folder: Path,
    capability: tuple[int, int],
    sm_count: int,
) -> KernelBuildTask:
    """Describe the kernels of an engine. folder: of compiled kernels."""
    config = _without_sizes(config)
    key = _manifest_key(config, model_config, capability, sm_count)
    return KernelBuildTask(
        config=config,
        options=options,
        capability=capability,
        sm_count=sm_count,
        folder=str(folder),
        manifest=str(folder / MANIFESTS / f"{key}.json"),
        max_processes=max(min(MAX_COMPILERS, cpu.available_cores() - 1), 1),
    )


def read_manifest(path: Path) -> list[KernelSpec] | None:
    """Return the kernels of a manifest; None: there is none that can be read.

    It may have come in an archive: it names nothing but kernels of quire.
    """
    try:
        kernels = msgspec.json.decode(path.read_bytes(), type=list[KernelSpec])
    except (OSError, msgspec.MsgspecError):
        return None
    return kernels if all(one.module.startswith(KERNEL_PACKAGE) for one in kernels) else None


def write_manifest(path: Path, kernels: list[KernelSpec]) -> None:
    """Write a manifest, whole or not at all."""
    with contextlib.suppress(OSError):  # as for the kernels: the folder may be read-only
        write_whole(path, msgspec.json.encode(kernels))


def _without_sizes(config: EngineConfig) -> EngineConfig:
    """Return the config without what differs between starts and machines and no kernel depends on:
    one block in each memory, one thread, and no limits of the queue."""
    host = min(config.cache.num_host_blocks, 1)
    scheduler = replace(
        config.scheduler,
        inter_token_target_s=0.0,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        policy="fcfs",
    )
    return replace(
        config,
        scheduler=scheduler,
        model=replace(config.model, logits_processors=()),
        cache=replace(config.cache, num_blocks=1, num_host_blocks=host),
        device=replace(config.device, threads=1),
    )


def _manifest_key(
    config: EngineConfig, model_config: object, capability: tuple[int, int], sm_count: int
) -> str:
    sections = msgspec.to_builtins(
        [config.cache, config.scheduler, config.device, config.parallel, config.model.logprobs_mode]
    )
    model = [config.model.dtype, config.model.quantization, config.model.vocab, repr(model_config)]
    versions = [version("torch"), version("triton"), _source_digest()]
    facts = [sections, model, versions, capability, sm_count, config.load.format == "dummy"]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _source_digest() -> str:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in SOURCES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
