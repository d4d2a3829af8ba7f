"""Start-up of an engine on a GPU, from a filled model to one that is ready. One call per engine.

Not here: how each thing is done (warm.py), which device (build.py). Kernels compile in other
processes once the steps that need them were rehearsed; then the cache gets what the worst step, as
measured, leaves of the memory.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from quire.config.config import EngineConfig
from quire.config.plan import GRAPHS, MIB, SLACK, SMALL, MemoryPlan, gib, refit, require_room
from quire.engine import warm
from quire.engine.receipt import Receipt
from quire.engine.warm import Half, Peak
from quire.kernels import cache
from quire.kernels.compiler import Compilers
from quire.platform import cpu, cuda

log = logging.getLogger(__name__)

COMPILERS = 16
"""Processes or threads that compile, at most."""
FEW = 4
"""Kernels that are compiled in threads; more are worth processes."""
COMPILE_S = 60.0
"""After this, processes that compile are given up."""
MOST_OVERHEAD = 2048 * MIB
"""More than any driver and library take: then somebody else did."""


@dataclass(frozen=True, slots=True)
class Started:
    """An engine's two halves, and the config and plan with what was measured in them."""

    half: Half
    config: EngineConfig
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class Room:
    """What was said and is true of the memory before the engine takes any."""

    held_by_others: int  # processes
    held_by_torch: int  # other engines of this process
    fixed_blocks: bool  # the number of blocks was given, or follows from given bytes
    any_length: bool  # max_model_len may shrink to what fits


def start(
    make: Callable[[EngineConfig], Half],
    config: EngineConfig,
    plan: MemoryPlan,
    room: Room,
    device: torch.device,
    receipt: Receipt,
    compilers: Compilers | None,
) -> Started:
    """Bring an engine up. make: build both halves for a config. Raises NoRoom.

    compilers: waiting for what the folder of kernels lacks, if it was known to lack much.
    """
    weights = torch.cuda.memory_allocated(device) - room.held_by_torch
    small = warm.small_config(config, plan.shape)
    cold = compile_for(make(small), small, receipt, compilers)
    _drop(device)  # now, not in the middle of what is measured
    half = make(small)  # a rehearsal may leave anything behind
    peak = warm.measure(half, small, device)
    kv_bytes = small.cache.num_blocks * small.cache.block_bytes
    own = torch.cuda.memory_allocated(device) - room.held_by_torch
    kept = own - weights - kv_bytes  # buffers of a half
    log.debug(
        "measured: weights %d, the worst step %d (%d with gaps), captured ones %d, buffers %d",
        weights, peak.step, peak.reserved, peak.captured, kept,
    )  # fmt: skip
    del half
    _drop(device)
    receipt.lap("worst step")
    config, plan = sized(config, plan, room, peak, weights, kept, device)
    half = make(config)
    torch.cuda.synchronize(device)
    receipt.lap("KV cache")
    warm.settle_in(half, config, seconds=0 if cold else warm.CAPTURE_S)
    torch.cuda.synchronize(device)
    receipt.lap("capture")
    _say(plan, device)
    return Started(half, config, plan)


def compile_for(
    half: Half, config: EngineConfig, receipt: Receipt, compilers: Compilers | None
) -> bool:
    """Find the kernels the steps need and make them ready. True: the folder lacked many.

    Then only those of the first steps are there; processes go on with the others.
    """
    wanted: list[cache.Wanted] = []
    urgent: list[cache.Wanted] = []
    try:
        with cache.rehearsal(wanted.append):
            warm.rehearse(half, config)
            urgent = list(wanted)
            warm.rehearse_sizes(half, config)
    except Exception:  # whatever is wrong shows again, and is told, when it is run for real
        log.debug("the rehearsal ended early: kernels compile as they come", exc_info=True)
    receipt.lap("rehearsal")
    absent, others = cache.load_kept(urgent), cache.load_kept(wanted[len(urgent) :])
    missing, cold = absent + others, len(absent) + len(others) > FEW
    if cold:
        count = max(min(COMPILERS, cpu.threads() - 1), 1)  # one core is for us
        compilers = compilers or Compilers(cache.folder())
        missing = compilers.make_ready(missing, len(absent), count, COMPILE_S)
    elif compilers is not None:
        compilers.end()
    # Only now in threads: the rehearsal's calls into torch would wait for the GIL behind them all.
    with ThreadPoolExecutor(min(COMPILERS, cpu.threads())) as pool:
        errors = [one.exception() for one in [pool.submit(kernel.make) for kernel in missing]]
    receipt.lap("compile")
    failed = sum(error is not None for error in errors)  # where they are used they tell why
    log.debug(
        "%d kernels, %d for the first steps; the folder lacked %d and %d; %d failed",
        len(wanted), len(urgent), len(absent), len(others), failed,
    )  # fmt: skip
    return cold


def sized(
    config: EngineConfig,
    plan: MemoryPlan,
    room: Room,
    peak: Peak,
    weights: int,
    kept: int,
    device: torch.device,
) -> tuple[EngineConfig, MemoryPlan]:
    """Config and plan with a cache of the size that the measured peak leaves."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    own = cuda.held_by_this_process()
    overhead = (total - free - room.held_by_others if own is None else own) - reserved
    if not 0 < overhead < MOST_OVERHEAD:  # others have come or gone meanwhile
        overhead = plan.overhead_bytes
    steps = kept + peak.reserved + SLACK + SMALL
    if not config.device.enforce_eager:
        steps += peak.captured + GRAPHS
    spare = reserved - torch.cuda.memory_allocated(device)
    now = min(plan.allowed_bytes, free + spare + weights + overhead)  # others may have come since
    plan = refit(
        replace(plan, allowed_bytes=now),
        weights=weights,
        activations=steps,
        overhead=overhead,
        num_blocks=plan.num_blocks if room.fixed_blocks else None,
    )
    if room.any_length and 0 < plan.longest < plan.shape.max_model_len:
        log.warning("max_model_len is %d: no longer sequence fits in memory", plan.longest)
        plan = replace(plan, shape=replace(plan.shape, max_model_len=plan.longest))
    if not room.fixed_blocks:
        require_room(plan)
    warm.check_fit(plan, free - steps)
    scheduler = replace(config.scheduler, max_model_len=plan.shape.max_model_len)
    kv = replace(config.cache, num_blocks=plan.num_blocks)
    return replace(config, cache=kv, scheduler=scheduler), plan


def _drop(device: torch.device) -> None:
    """Give what a dropped half held back to the driver, so that the cache can be one piece."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()  # one per stream, and the half had its own
    torch.cuda.empty_cache()


def _say(plan: MemoryPlan, device: torch.device) -> None:
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
