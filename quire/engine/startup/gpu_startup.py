"""GPU start-up: brings an engine from a filled model to ready, once per engine.

Its kernels are loaded (kernel_builder). The largest step is measured, and the KV cache gets the
memory that is left. At the end every graph is captured: nothing is compiled, loaded or captured
after that. warmup.py has the single stages; each runs on all ranks at once, through the executor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

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
from quire.config.stages import stage_cache
from quire.distributed.mesh import mesh_of
from quire.engine.startup import warmup
from quire.engine.startup.gpu_memory import DeviceUse, free_device_memory, measure_device
from quire.engine.startup.memory_record import MemoryRecord, read_record, write_record
from quire.engine.startup.startup_timer import StartupTimer
from quire.engine.startup.warmup import PeakMemory, SchedulerAndExecutor
from quire.errors import NoRoom

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

    held_by_torch: int  # other engines of this process
    has_fixed_blocks: bool  # the number of blocks was given, or follows from given bytes
    can_shrink_max_len: bool  # max_model_len may shrink to what fits


MeasureRanks = Callable[[DeviceUse], Sequence[DeviceUse]]
"""Called with the use of this rank's GPU: returns those of all ranks."""


def start_on_gpu(
    make: Callable[[EngineConfig], SchedulerAndExecutor],
    config: EngineConfig,
    plan: MemoryPlan,
    situation: MemorySituation,
    device: torch.device,
    timer: StartupTimer,
    record_path: Path,
    measure_ranks: MeasureRanks | None = None,
) -> GpuStartupResult:
    """Bring an engine up whose kernels are loaded. Raises NoRoom.

    make: build scheduler and executor for a config. record_path: of the memory record. Of several
    ranks (measure_ranks), all take part in each step, and the cache fits the tightest.
    """
    startup = _GpuStartup(make, plan, situation, device, timer, measure_ranks)
    record = None if config.model.logits_processors else read_record(record_path)
    if record is not None:
        with suppress(NoRoom):
            return startup.run(config, record)
        # not within an except clause, whose traceback would keep the cache
        log.info("the recorded memory of the largest step does not fit: it is measured again")
        startup.free_memory()
    peak, buffers = startup.measure(config)
    overhead = sane_overhead(measure_device(device, situation.held_by_torch), plan)
    record = write_record(record_path, peak, buffers, overhead)
    timer.lap("worst step")
    return startup.run(config, record)


@dataclass(frozen=True, slots=True)
class _GpuStartup:
    make: Callable[[EngineConfig], SchedulerAndExecutor]
    plan: MemoryPlan
    situation: MemorySituation
    device: torch.device
    timer: StartupTimer
    measure_ranks: MeasureRanks | None

    def measure(self, config: EngineConfig) -> tuple[PeakMemory, int]:
        """Run the largest step with a small cache. Returns: its peak, and the bytes of the buffers
        of scheduler and executor."""
        held = self.situation.held_by_torch
        weights = measure_device(self.device, held).allocated
        small = warmup.profiling_config(config, self.plan.shape)
        half = self.make(small)
        peak = warmup.measure_peak_memory(half, small)
        kv_bytes = small.cache.num_blocks * stage_cache(small.cache, small.parallel, 0).block_bytes
        buffers = measure_device(self.device, held).allocated - weights - kv_bytes
        log.debug(
            "measured: weights %d, the worst step %d (%d with gaps), captured ones %d, buffers %d",
            weights, peak.step_bytes, peak.reserved_bytes, peak.captured_bytes, buffers,
        )  # fmt: skip
        del half
        self.free_memory()
        return peak, buffers

    def free_memory(self) -> None:
        free_device_memory(self.device, others=self.situation.held_by_torch > 0)

    def run(self, config: EngineConfig, record: MemoryRecord) -> GpuStartupResult:
        """Size and allocate the KV cache, and capture all graphs. Raises NoRoom."""
        own = measure_device(self.device, self.situation.held_by_torch)
        uses = [own] if self.measure_ranks is None else self.measure_ranks(own)
        config, plan = size_kv_cache(config, self.plan, self.situation, record, uses)
        half = self.make(config)
        torch.cuda.synchronize(self.device)
        self.timer.lap("KV cache")
        log.debug("the engine captures its graphs")
        warmup.capture_graphs(half, config, record.captured_bytes)
        torch.cuda.synchronize(self.device)
        self.timer.lap("capture")
        _log_memory(plan, self.device)
        return GpuStartupResult(half, config, plan)


def sane_overhead(use: DeviceUse, plan: MemoryPlan) -> int:
    """Return the bytes that the driver and the libraries use now."""
    if 0 < use.overhead < MAX_OVERHEAD_BYTES:
        return use.overhead
    return plan.overhead_bytes  # other processes have allocated or freed meanwhile


def size_kv_cache(
    config: EngineConfig,
    plan: MemoryPlan,
    situation: MemorySituation,
    record: MemoryRecord,
    uses: Sequence[DeviceUse],
) -> tuple[EngineConfig, MemoryPlan]:
    """Return config and plan with a cache in the memory that the measured step leaves on the
    tightest of the ranks' GPUs. Raises NoRoom."""
    steps = record.buffer_bytes + max(record.reserved_bytes, plan.encoder_step_bytes)
    steps += FRAGMENTATION_RESERVE + SMALL_BLOCK_RESERVE
    if not config.device.enforce_eager:
        steps += record.captured_bytes + CUDA_GRAPH_BYTES
    fixed = plan.num_blocks if situation.has_fixed_blocks else None
    plans = []
    for rank, use in enumerate(uses):
        stage = mesh_of(config.parallel, rank).pp_rank
        own = stage_cache(config.cache, config.parallel, stage)
        used_yet = sane_overhead(use, plan)  # libraries may still load
        now = min(plan.allowed_bytes, use.free + use.spare + use.allocated + used_yet)
        fitted = apply_measurements(
            replace(
                plan, allowed_bytes=now, block_bytes=own.block_bytes
            ),  # others may have allocated
            weights=use.allocated,
            activations=steps,
            overhead=max(record.overhead_bytes, used_yet)
            if len(uses) > 1
            else record.overhead_bytes,
            num_blocks=fixed,
        )
        plans.append(fitted)
    plan = min(plans, key=lambda one: one.kv_available_bytes / max(one.block_bytes, 1))
    if situation.can_shrink_max_len and 0 < plan.max_fitting_len < plan.shape.max_model_len:
        log.warning("max_model_len is %d: no longer sequence fits in memory", plan.max_fitting_len)
        plan = replace(plan, shape=replace(plan.shape, max_model_len=plan.max_fitting_len))
    require_memory(plan)
    for use, fitted in zip(uses, plans, strict=True):
        warmup.check_cache_fits(plan.num_blocks * fitted.block_bytes, use.free - steps)
    scheduler = replace(config.scheduler, max_model_len=plan.shape.max_model_len)
    kv = replace(config.cache, num_blocks=plan.num_blocks)
    return replace(config, cache=kv, scheduler=scheduler), plan


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
