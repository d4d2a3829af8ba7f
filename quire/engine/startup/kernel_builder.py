"""Kernel builder: has every GPU kernel of an engine compiled and loaded before it is ready.

    known start     the folder of kernels has a manifest for this model, config, GPU and code: its
                    kernels are loaded, and no other process starts
    other starts    a process finds the kernels (kernel_enumeration) and compiles those that the
                    folder lacks, while this process loads the weights; then it writes the manifest

Ranks and engines that start at once need the same kernels: one of them has them compiled, and the
others wait for a lock beside the manifest.

Imports neither torch nor Triton before kernels are loaded, so that the process can start early.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
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
from quire.platform import bytecode_cache, cpu, cuda
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
    "distributed",
    "engine/startup",
    "kernels",
    "layers",
    "models",
    "quant",
    "runner",
    "sampling",
)
"""Packages whose code decides which kernels an engine needs."""
NO_KERNELS = ("model", "load", "sampling", "observe", "structured", "recovery", "health", "media")
"""Sections of a config on which no kernel depends; of the model's, some fields do."""


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
    peers: bool = True  # the GPUs of all ranks access each other's memory


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
        self.status = 0  # of its exit, after receive()

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
        self.status = self._process.wait()

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
    if _early_process is None and not kept and cuda.has_driver():
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
        """Read the manifest, or have a process find the kernels, if no other has begun to."""
        self._task = task
        self._process: KernelBuildProcess | None = None
        self._lock = _BuildLock(Path(task.manifest).with_suffix(".lock"))
        self._known = read_manifest(Path(task.manifest))
        if self._known is None and self._lock.acquire(wait=False):
            self._start_process()

    def load(self) -> int:
        """Load every kernel, as they get ready. Returns: how many. The device must be open.

        Blocks while another process has the same kernels compiled.
        """
        try:
            if self._known is None and self._process is None:
                self._lock.acquire(wait=True)
                self._known = read_manifest(Path(self._task.manifest))
                if self._known is None:
                    self._start_process()
            return self._load()
        finally:
            self._lock.release()

    def _load(self) -> int:
        from quire.kernels.framework.kernel_precompile import load_cached

        if self._known is not None:
            if not load_cached(self._known):
                return len(self._known)
            log.info("the folder of kernels lacks some of its manifest: %s", self._task.folder)
            self._start_process()
        count, complete = self._load_compiled()
        if self._process is not None and self._process.status:
            # what it has compiled is found again; a kernel that cannot be compiled has status 0
            log.warning("the process of GPU kernels ended with status %d", self._process.status)
            self._start_process()
            count, complete = self._load_compiled()
        if not complete:
            log.warning(
                "not all GPU kernels could be compiled ahead (the lines above say why): the others "
                "compile in the first step that needs them"
            )
        return count

    def _load_compiled(self) -> tuple[int, bool]:
        """Load the kernels of the process, as they get ready. Returns: how many, and whether these
        are all."""
        from quire.kernels.framework.kernel_precompile import load_cached

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
        return count, complete

    @property
    def memory_record(self) -> Path:
        """The file of quire.engine.startup.memory_record for this engine."""
        return Path(self._task.manifest).with_suffix(".memory.json")

    def _start_process(self) -> None:
        global _early_process
        self._process = _early_process or KernelBuildProcess()
        _early_process = None
        self._process.send(self._task)


class _BuildLock:
    """A file that one process at a time holds. Where none can be locked, every process does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, *, wait: bool) -> bool:
        """Return whether this process holds it now. It ends with the process, at the latest."""
        if self._fd is not None:
            return True
        import fcntl

        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # a folder that cannot be written to
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:  # a file system without locks
            os.close(fd)
            return True
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def build_task(
    config: EngineConfig,
    options: dict[str, Any],
    model_config: object,
    folder: Path,
    capability: tuple[int, int],
    sm_count: int,
    *,
    peers: bool = True,
) -> KernelBuildTask:
    """Describe the kernels of an engine. folder: of compiled kernels. peers: the GPUs of all ranks
    access each other's memory."""
    config = _without_sizes(config)
    key = _manifest_key(config, model_config, capability, sm_count, peers)
    return KernelBuildTask(
        config=config,
        options=options,
        capability=capability,
        sm_count=sm_count,
        folder=str(folder),
        manifest=str(folder / MANIFESTS / f"{key}.json"),
        max_processes=max(min(MAX_COMPILERS, cpu.available_cores() - 1), 1),
        peers=peers,
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
    one block in each memory, one adapter in host memory, one thread, one engine, and no limits of
    the queue."""
    host = min(config.cache.num_host_blocks, 1)
    scheduler = replace(
        config.scheduler,
        inter_token_target_s=0.0,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        policy="fcfs",
    )
    adapters, encoder = config.adapters, config.media_encoder
    return replace(
        config,
        adapters=adapters and replace(adapters, max_host=1, modules=()),
        media_encoder=encoder and replace(encoder, cache_rows=encoder.step_rows),
        scheduler=scheduler,
        model=replace(config.model, logits_processors=()),
        cache=replace(config.cache, num_blocks=1, num_host_blocks=host),
        device=replace(config.device, threads=1),
        parallel=replace(config.parallel, engines=1, step_limit_s=1.0),
    )


def _manifest_key(
    config: EngineConfig,
    model_config: object,
    capability: tuple[int, int],
    sm_count: int,
    peers: bool,
) -> str:
    sections = {
        name: value for name, value in msgspec.to_builtins(config).items() if name not in NO_KERNELS
    }
    model = [config.model.dtype, config.model.quantization, config.model.vocab, repr(model_config)]
    model.append(config.model.logprobs_mode)
    versions = [version("torch"), version("triton"), _source_digest()]
    facts = [sections, model, versions, capability, sm_count, config.load.format == "dummy", peers]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _source_digest() -> str:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in SOURCES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
