"""GPU start-up: brings an engine from a filled model to ready, once per engine.

A trace of the steps finds the kernels that they need, which compile in other processes. Then the
largest step is measured, and the KV cache gets the memory that is left. warmup.py has the
single stages.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from quire.config.engine_config import EngineConfig
from quire.config.memory.memory_plan import (
    CUDA_GRAPH_BYTES,
    FRAGMENTATION_RESERVE,
    MIB,
    SMALL_BLOCK_RESERVE,
    MemoryPlan,
    apply_measurements,
    gib,
    require_memory,
)
from quire.engine.startup import warmup
from quire.engine.startup.startup_timer import StartupTimer
from quire.engine.startup.warmup import PeakMemory, SchedulerAndExecutor
from quire.kernels.framework import kernel_precompile
from quire.kernels.framework.compiler import CompilerProcess
from quire.platform import cpu, cuda

log = logging.getLogger(__name__)

MAX_COMPILERS = 16
"""Maximum of processes or threads that compile."""
MAX_THREAD_COMPILES = 4
"""Up to this many kernels are compiled in threads; for more, processes are faster."""
COMPILE_TIMEOUT_S = 60.0
"""Seconds after which compile processes are killed."""
MAX_OVERHEAD_BYTES = 2048 * MIB
"""More than any driver and library use: a larger difference is memory of other processes."""


@dataclass(frozen=True, slots=True)
class GpuStartupResult:
    """An engine's scheduler and executor, and the config and plan with the measured memory."""

    engine_parts: SchedulerAndExecutor
    config: EngineConfig
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class MemorySituation:
    """Options about memory, and the memory in use before the engine allocates any."""

    held_by_others: int  # processes
    held_by_torch: int  # other engines of this process
    has_fixed_blocks: bool  # the number of blocks was given, or follows from given bytes
    can_shrink_max_len: bool  # max_model_len may shrink to what fits


def start_on_gpu(
    make: Callable[[EngineConfig], SchedulerAndExecutor],
    config: EngineConfig,
    plan: MemoryPlan,
    situation: MemorySituation,
    device: torch.device,
    timer: StartupTimer,
    compilers: CompilerProcess | None,
) -> GpuStartupResult:
    """Bring an engine up. make: build scheduler and executor for a config. Raises NoRoom.

    compilers: a process that waits for kernels, if the folder of kernels is known to lack many.
    """
    weights = torch.cuda.memory_allocated(device) - situation.held_by_torch
    small = warmup.profiling_config(config, plan.shape)
    compile_kernels(make(small), small, timer, compilers)
    _free_device_memory(device)  # now, not in the middle of the measurement
    half = make(small)  # a trace may leave any state behind
    peak = warmup.measure_peak_memory(half, small)
    kv_bytes = small.cache.num_blocks * small.cache.block_bytes
    own = torch.cuda.memory_allocated(device) - situation.held_by_torch
    kept = own - weights - kv_bytes  # buffers of scheduler and executor
    log.debug(
        "measured: weights %d, the worst step %d (%d with gaps), captured ones %d, buffers %d",
        weights, peak.step_bytes, peak.reserved_bytes, peak.captured_bytes, kept,
    )  # fmt: skip
    del half
    _free_device_memory(device)
    timer.lap("worst step")
    config, plan = size_kv_cache(config, plan, situation, peak, weights, kept, device)
    half = make(config)
    torch.cuda.synchronize(device)
    timer.lap("KV cache")
    warmup.capture_graphs(half, config, peak.captured_bytes)
    torch.cuda.synchronize(device)
    timer.lap("capture")
    _log_memory(plan, device)
    return GpuStartupResult(half, config, plan)


def compile_kernels(
    half: SchedulerAndExecutor,
    config: EngineConfig,
    timer: StartupTimer,
    compilers: CompilerProcess | None,
) -> bool:
    """Find the kernels that the steps need and load them. True: the folder lacked many.

    Then only those of the first steps are loaded; processes compile the others meanwhile.
    """
    wanted: list[kernel_precompile.MissingKernel] = []
    urgent: list[kernel_precompile.MissingKernel] = []
    try:
        with kernel_precompile.trace_missing_kernels(wanted.append):
            warmup.trace_kernels(half, config)
            urgent = list(wanted)
            warmup.trace_kernels_by_size(half, config)
    except Exception:  # the error is raised and reported again when the step really runs
        log.debug("the trace ended early: kernels compile as they are used", exc_info=True)
    timer.lap("rehearsal")
    absent, others = (
        kernel_precompile.load_cached(urgent),
        kernel_precompile.load_cached(wanted[len(urgent) :]),
    )
    missing, cold = absent + others, len(absent) + len(others) > MAX_THREAD_COMPILES
    if cold:
        count = max(min(MAX_COMPILERS, cpu.available_cores() - 1), 1)  # one core for this thread
        compilers = compilers or CompilerProcess(kernel_precompile.cache_dir())
        missing = compilers.compile_and_load(missing, len(absent), count, COMPILE_TIMEOUT_S)
    elif compilers is not None:
        compilers.stop()
    # Threads start only now: otherwise the trace's calls into torch would wait for the GIL.
    with ThreadPoolExecutor(min(MAX_COMPILERS, cpu.available_cores())) as pool:
        errors = [
            one.exception() for one in [pool.submit(kernel.load_or_compile) for kernel in missing]
        ]
    timer.lap("compile")
    failed = sum(error is not None for error in errors)  # they raise where they are used
    log.debug(
        "%d kernels, %d for the first steps; the folder lacked %d and %d; %d failed",
        len(wanted), len(urgent), len(absent), len(others), failed,
    )  # fmt: skip
    return cold


def size_kv_cache(
    config: EngineConfig,
    plan: MemoryPlan,
    situation: MemorySituation,
    peak: PeakMemory,
    weights: int,
    kept: int,
    device: torch.device,
) -> tuple[EngineConfig, MemoryPlan]:
    """Return config and plan with a cache in the memory that the measured peak leaves."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    own = cuda.own_memory_bytes()
    overhead = (total - free - situation.held_by_others if own is None else own) - reserved
    if not 0 < overhead < MAX_OVERHEAD_BYTES:  # other processes have allocated or freed meanwhile
        overhead = plan.overhead_bytes
    steps = kept + peak.reserved_bytes + FRAGMENTATION_RESERVE + SMALL_BLOCK_RESERVE
    if not config.device.enforce_eager:
        steps += peak.captured_bytes + CUDA_GRAPH_BYTES
    spare = reserved - torch.cuda.memory_allocated(device)
    now = min(plan.allowed_bytes, free + spare + weights + overhead)  # others may have allocated
    plan = apply_measurements(
        replace(plan, allowed_bytes=now),
        weights=weights,
        activations=steps,
        overhead=overhead,
        num_blocks=plan.num_blocks if situation.has_fixed_blocks else None,
    )
    if situation.can_shrink_max_len and 0 < plan.max_fitting_len < plan.shape.max_model_len:
        log.warning("max_model_len is %d: no longer sequence fits in memory", plan.max_fitting_len)
        plan = replace(plan, shape=replace(plan.shape, max_model_len=plan.max_fitting_len))
    require_memory(plan)
    warmup.check_cache_fits(plan, free - steps)
    scheduler = replace(config.scheduler, max_model_len=plan.shape.max_model_len)
    kv = replace(config.cache, num_blocks=plan.num_blocks)
    return replace(config, cache=kv, scheduler=scheduler), plan


def _free_device_memory(device: torch.device) -> None:
    """Return the memory of dropped engine parts to the driver, so that the cache can be one
    piece."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()  # one per stream
    torch.cuda.empty_cache()


def _log_memory(plan: MemoryPlan, device: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(device)
    log.info(
        "GPU memory: weights %s, steps %s, context and libraries %s, KV %s; %s of %s stay free",
        gib(plan.weight_bytes),
        gib(plan.activation_bytes),
        gib(plan.overhead_bytes),
        gib(plan.num_blocks * plan.block_bytes),
        gib(free),
        gib(total),
    )
