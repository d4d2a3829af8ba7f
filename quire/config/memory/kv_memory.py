"""KV memory: computes the size of the KV cache from the most direct option, or from free memory.

Part of resolve(): pure, every choice with its reason. memory_plan.py has the sizes of blocks and
steps.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from quire.config.decisions import DecisionLog
from quire.config.facts import DeviceFacts, ModelFacts
from quire.config.memory.memory_plan import (
    BLOCKS_OPTION,
    DEFAULT_UTILIZATION,
    GIB,
    EngineShape,
    MemoryPlan,
    gib,
    plan_memory,
)
from quire.config.options import Options

log = logging.getLogger(__name__)

DEFAULT_MAX_LEN = 2048
SHARED_GPU_RESERVE = GIB // 4
"""Left free on a shared GPU: other processes allocate in pieces, and at any time."""
CPU_KV_BYTES = 4 * GIB
CPU_PREFIX_FACTOR = 4
"""On a CPU, memory is shared with other processes: the cache does not exceed this many times what
max_num_seqs can use. The rest would hold ever older prefixes."""


def resolve_kv_memory(
    options: Options, model: ModelFacts, device: DeviceFacts, shape: EngineShape, why: DecisionLog
) -> MemoryPlan:
    """Return the plan with the cache's bytes, by the most direct option that is given."""
    cache = options.cache
    allowed, reason = _allowed_bytes(options, device)
    kv_bytes = most = sized_by = None
    if cache.num_gpu_blocks_override is not None:
        reason = sized_by = BLOCKS_OPTION
    elif cache.kv_cache_memory_bytes is not None:
        kv_bytes, reason = cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        sized_by = reason
    elif cache.cpu_kvcache_space and device.kind == "cpu":
        kv_bytes, reason = int(cache.cpu_kvcache_space * GIB), "cpu_kvcache_space"
        sized_by = reason
    elif not model.layers:
        reason = "the model has no KV"
    elif not _is_utilization_given(options) and device.kind == "cpu":
        one = plan_memory(model, shape, device_bytes=0, allowed_bytes=allowed)
        rest = max(one.kv_available_bytes, 0)
        kv_bytes = min(max(CPU_KV_BYTES, one.max_len_kv_bytes), device.free_bytes // 2, rest)
        reason = f"on a CPU 4 GiB, or half of the {gib(device.free_bytes)} available"
        if kv_bytes == rest:
            reason = f"what weights and activations leave of {gib(allowed)}"
        elif kv_bytes == one.max_len_kv_bytes:
            reason = "one sequence of max_model_len"
        most = shape.max_num_seqs * one.max_len_kv_bytes
        if most < kv_bytes:
            reason = "max_num_seqs * max_model_len needs no more"
    elif device.kind == "cpu":
        one = plan_memory(model, shape, device_bytes=0, allowed_bytes=0, kv_bytes=0)
        most = CPU_PREFIX_FACTOR * shape.max_num_seqs * one.max_len_kv_bytes
    plan = plan_memory(
        model,
        shape,
        device_bytes=device.total_bytes,
        allowed_bytes=allowed,
        free_bytes=device.free_bytes,
        num_blocks=cache.num_gpu_blocks_override,
        kv_bytes=kv_bytes,
        most_bytes=most,
    )
    why.record("cache.num_blocks", plan.num_blocks, reason)
    return replace(
        plan,
        sized_by=sized_by,
        given_share=cache.gpu_memory_utilization or 1.0,
        has_absolute_budget=cache.gpu_memory is not None,
    )


def _is_utilization_given(options: Options) -> bool:
    return options.cache.gpu_memory_utilization is not None or options.cache.gpu_memory is not None


def _allowed_bytes(options: Options, device: DeviceFacts) -> tuple[int, str]:
    """Bytes quire may use, weights included: by the options, and at most the free ones."""
    share = options.cache.gpu_memory_utilization
    if options.cache.gpu_memory is not None:
        size, reason = int(options.cache.gpu_memory * (share or 1.0)), "the rest of gpu_memory"
    else:
        share = share or DEFAULT_UTILIZATION
        size = int(device.total_bytes * share)
        reason = f"the rest of {share:.0%} of {gib(device.total_bytes)}"
    if size <= device.free_bytes:
        return size, reason
    if device.kind == "cpu":
        return device.free_bytes, f"what is free of {gib(device.total_bytes)}"
    free = device.free_bytes - SHARED_GPU_RESERVE
    held = gib(device.total_bytes - device.free_bytes)
    log.warning(
        "of the GPU's %s, other processes use %s: quire uses %s instead of %s",
        gib(device.total_bytes), held, gib(max(free, 0)), gib(size),
    )  # fmt: skip
    return free, f"what is free of {gib(device.total_bytes)}: other processes use {held}"


def may_reduce_max_model_len(options: Options, device: DeviceFacts, plan: MemoryPlan) -> bool:
    """Whether to serve a shorter length: on a CPU without an option for length or memory."""
    given = options.model.max_model_len is not None or _is_utilization_given(options)
    cache = options.cache
    given = given or cache.kv_cache_memory_bytes is not None or bool(cache.cpu_kvcache_space)
    given = given or cache.num_gpu_blocks_override is not None
    return device.kind == "cpu" and not given and plan.max_fitting_len < plan.shape.max_model_len


def fit_max_model_len(plan: MemoryPlan, model: ModelFacts, why: DecisionLog) -> MemoryPlan:
    """Resolve max_model_len="auto": the model's length, or the longest that fits."""
    wanted = model.max_len or DEFAULT_MAX_LEN
    length = min(wanted, plan.max_fitting_len)
    if length < 1:
        return plan  # require_memory raises
    if length < wanted:
        log.warning("max_model_len is %d: the model's %d does not fit in memory", length, wanted)
    reason = "auto: the model's" if length == wanted else "auto: the longest that fits"
    why.record("scheduler.max_model_len", length, reason)
    return replace(plan, shape=replace(plan.shape, max_model_len=length))
