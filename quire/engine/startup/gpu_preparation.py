"""GPU preparation: what a rank with a GPU begins before it loads its model, in other threads.

The CUDA context takes a second or two of the driver, and Triton as long to import; another process
finds and compiles the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quire import env
from quire.config.engine_config import EngineConfig
from quire.engine.startup.kernel_builder import KernelBuilder, build_task
from quire.engine.startup.model_setup import ModelDescription
from quire.engine.startup.startup_timer import StartupTimer
from quire.kernels.framework import kernel_precompile
from quire.platform import cuda, kernel_store


class GpuPreparation:
    """The kernels of an engine, and the opening of this process's device."""

    def __init__(
        self,
        found: ModelDescription,
        config: EngineConfig,
        options: Mapping[str, Any],
        environment: env.Env,
        device: torch.device,
        timer: StartupTimer,
    ) -> None:
        """config, options: as plain_config() returns them."""
        self.device = device
        self._environment = environment
        facts = cuda.device_properties(device.index)
        self._folder = kernel_store.make_folder(_kernel_folder(config, environment))
        kernel_store.add_installed(environment.cache_dir, facts.capability)
        section = config.parallel
        here = range(min(section.ranks, facts.device_count))
        task = build_task(
            config, dict(options), found.config, self._folder, facts.capability, facts.sm_count,
            peers=section.custom_all_reduce and cuda.have_peer_access(here),
        )  # fmt: skip
        self.kernels = KernelBuilder(task)
        self._opening: list[Future[None]] = [
            timer.run_concurrently("CUDA context", self._open_context),
            timer.run_concurrently("Triton", self._import_triton),
        ]

    def wait(self) -> None:
        """Wait until kernels can run. A device other than the first becomes this thread's."""
        for one in self._opening:
            one.result()
        if self.device.index:
            torch.cuda.set_device(self.device)

    def _open_context(self) -> None:
        """Open the CUDA context: it takes a second or two, outside the interpreter."""
        cuda.open_context(self.device.index)
        torch.zeros(1, device=self.device)

    def _import_triton(self) -> None:
        import triton  # noqa: F401 - it reads much

        if self._environment.triton_cache is None:
            kernel_precompile.set_cache_dir(self._folder)


def compute_compiler_key() -> None:
    """Hash Triton's sources, which does not need the options."""
    if cuda.available():
        kernel_precompile.compute_compiler_key()


def _kernel_folder(config: EngineConfig, environment: env.Env) -> Path:
    if environment.triton_cache is not None:
        return environment.triton_cache
    kind, compiler = config.device.capability, version("triton")
    return kernel_store.kernel_folder(environment.cache_dir, compiler, kind)
