"""GPU start-up: brings an engine from a filled model to ready, once per engine.

All kernels are loaded (kernel_builder). Then the largest step is measured, and the KV cache gets
the memory that is left. At the end every graph is captured: nothing is compiled, loaded or captured
after that. warmup.py has the single stages.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
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
from quire.engine.startup.kernel_builder import KernelBuilder
from quire.engine.startup.memory_record import MemoryRecord, read_record, write_record
from quire.engine.startup.startup_timer import StartupTimer
from quire.engine.startup.warmup import PeakMemory, SchedulerAndExecutor
from quire.errors import NoRoom
from quire.platform import cuda

log = logging.getLogger(__name__)

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
    kernels: KernelBuilder,
) -> GpuStartupResult:
    """Bring an engine up. make: build scheduler and executor for a config. Raises NoRoom.

    kernels: begun for this engine.
    """
    log.debug("%d kernels", kernels.load())
    timer.lap("kernels")
    weights = torch.cuda.memory_allocated(device) - situation.held_by_torch
    record = None if config.model.logits_processors else read_record(kernels.memory_record)
    if record is not None:
        with suppress(NoRoom):
            return _start_measured(make, config, plan, situation, record, weights, device, timer)
        # not within an except clause, whose traceback would keep the cache
        log.info("the recorded memory of the largest step does not fit: it is measured again")
        _free_device_memory(device)
    peak, buffers = _measure(make, config, plan, situation, weights, device)
    overhead = _measure_overhead(plan, situation, device)
    record = write_record(kernels.memory_record, peak, buffers, overhead)
    timer.lap("worst step")
    return _start_measured(make, config, plan, situation, record, weights, device, timer)


def _measure(
    make: Callable[[EngineConfig], SchedulerAndExecutor],
    config: EngineConfig,
    plan: MemoryPlan,
    situation: MemorySituation,
    weights: int,
    device: torch.device,
) -> tuple[PeakMemory, int]:
    """Run the largest step with a small cache. Returns: its peak, and the bytes of the buffers of
    scheduler and executor."""
    small = warmup.profiling_config(config, plan.shape)
    half = make(small)
    peak = warmup.measure_peak_memory(half, small)
    kv_bytes = small.cache.num_blocks * small.cache.block_bytes
    own = torch.cuda.memory_allocated(device) - situation.held_by_torch
    buffers = own - weights - kv_bytes
    log.debug(
        "measured: weights %d, the worst step %d (%d with gaps), captured ones %d, buffers %d",
        weights, peak.step_bytes, peak.reserved_bytes, peak.captured_bytes, buffers,
    )  # fmt: skip
    del half
    _free_device_memory(device)
    return peak, buffers


def _measure_overhead(plan: MemoryPlan, situation: MemorySituation, device: torch.device) -> int:
    """Return the bytes that the driver and the libraries use now."""
    free, total = torch.cuda.mem_get_info(device)
    own = cuda.own_memory_bytes()
    used = total - free - situation.held_by_others if own is None else own
    overhead = used - torch.cuda.memory_reserved(device)
    if 0 < overhead < MAX_OVERHEAD_BYTES:
        return overhead
    return plan.overhead_bytes  # other processes have allocated or freed meanwhile


def _start_measured(
    make: Callable[[EngineConfig], SchedulerAndExecutor],
    config: EngineConfig,
    plan: MemoryPlan,
    situation: MemorySituation,
    record: MemoryRecord,
    weights: int,
    device: torch.device,
    timer: StartupTimer,
) -> GpuStartupResult:
    """Size and allocate the KV cache, and capture all graphs. Raises NoRoom."""
    config, plan = size_kv_cache(config, plan, situation, record, weights, device)
    half = make(config)
    torch.cuda.synchronize(device)
    timer.lap("KV cache")
    warmup.capture_graphs(half, config, record.captured_bytes)
    torch.cuda.synchronize(device)
    timer.lap("capture")
    _log_memory(plan, device)
    return GpuStartupResult(half, config, plan)


def size_kv_cache(
    config: EngineConfig,
    plan: MemoryPlan,
    situation: MemorySituation,
    record: MemoryRecord,
    weights: int,
    device: torch.device,
) -> tuple[EngineConfig, MemoryPlan]:
    """Return config and plan with a cache in the memory that the measured step leaves."""
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    overhead = record.overhead_bytes
    steps = record.buffer_bytes + record.reserved_bytes
    steps += FRAGMENTATION_RESERVE + SMALL_BLOCK_RESERVE
    if not config.device.enforce_eager:
        steps += record.captured_bytes + CUDA_GRAPH_BYTES
    spare = reserved - torch.cuda.memory_allocated(device)
    used_yet = _measure_overhead(plan, situation, device)  # libraries may still load
    now = min(plan.allowed_bytes, free + spare + weights + used_yet)  # others may have allocated
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
