"""Host memory: computes the size of the host tier of the KV cache. Part of resolve(): pure."""

from __future__ import annotations

from dataclasses import replace

from quire.config.decisions import DecisionLog
from quire.config.facts import DeviceFacts
from quire.config.memory.memory_plan import GIB, MemoryPlan
from quire.config.options import CacheOptions
from quire.errors import ConfigError

DEFAULT_SWAP_SPACE = 4.0  # GiB


def with_host_tier(
    requested: CacheOptions,
    plan: MemoryPlan,
    stage_block_bytes: int,
    device: DeviceFacts,
    why: DecisionLog,
) -> MemoryPlan:
    """Add the blocks of the host tier to the plan, if there is one.

    stage_block_bytes: of a block on one rank of each pipeline stage.
    """
    size, knob = requested.kv_offloading_size, "kv_offloading_size"
    option = knob
    if requested.preemption_mode == "swap":
        if size and requested.swap_space not in (None, size):
            raise ConfigError(
                f"kv_offloading_size ({size:g} GiB) and swap_space ({requested.swap_space:g} GiB) "
                "are one pool of host memory: give one of them"
            )
        if not size:
            size = DEFAULT_SWAP_SPACE if requested.swap_space is None else requested.swap_space
            option, knob = "swap_space", "preemption_mode swap with swap_space"
    elif not size:
        return plan
    if not plan.groups:
        raise ConfigError(f"{knob}: the model has no KV to keep in host memory; leave it out")
    if requested.enable_prefix_caching is False:
        raise ConfigError(
            f"{knob} of {size:g} GiB needs enable_prefix_caching, which is off: KV in host memory "
            "is found by the prefix cache; turn prefix caching on, or leave out the host memory"
        )
    block_bytes = stage_block_bytes * plan.shape.tensor  # the size is that of all ranks together
    blocks = int(size * GIB) // block_bytes
    if not blocks:
        raise ConfigError(
            f"{knob} must have space for at least one block ({block_bytes} bytes), got {size:g} GiB"
        )
    return replace(
        plan,
        num_host_blocks=why.record("cache.num_host_blocks", blocks, f"{knob} of {size:g} GiB"),
        host_sized_by=option,
        host_free_bytes=device.host_free_bytes,
    )
