"""Parallelism: resolves the options of several devices."""

from __future__ import annotations

from typing import Literal

from quire.config.engine_config import ParallelSection
from quire.config.facts import DeviceFacts
from quire.config.memory.memory_plan import EngineShape
from quire.config.options import Options
from quire.errors import ConfigError


def resolve_tensor_parallel_size(options: Options, device: DeviceFacts) -> int:
    ranks = options.parallel.tensor_parallel_size
    if ranks > device.count:
        message = f"tensor_parallel_size={ranks} needs as many devices; this engine can use"
        hint = ""
        if device.kind != "cpu":
            hint = ": tensor parallelism over GPUs is not built yet, over CPU processes it is"
        raise ConfigError(f"{message} {device.count}{hint}")
    return ranks


def resolve_parallel(options: Options, shape: EngineShape, *, server: bool) -> ParallelSection:
    """Resolve how ranks run. Raises ConfigError."""
    section = options.parallel
    engines = section.data_parallel_size
    if engines > 1 and not server:
        raise ConfigError(
            f"data_parallel_size={engines}: only `quire serve` runs several engines; here start "
            "one on each device (CUDA_VISIBLE_DEVICES)"
        )
    backend = section.distributed_executor_backend
    if backend == "ray":
        raise ConfigError(
            "distributed_executor_backend='ray' is not supported yet: it comes with models on "
            "several machines. On one host use 'mp'"
        )
    if backend == "uni" and shape.ranks > 1:
        raise ConfigError(
            f"distributed_executor_backend='uni' is one rank, and "
            f"tensor_parallel_size={shape.tensor}: use 'mp'"
        )
    if backend == "external_launcher" and server:
        raise ConfigError(
            "distributed_executor_backend='external_launcher' is for LLM() in programs that "
            "torchrun starts, where all ranks make the same calls; a server uses 'mp'"
        )
    kind: Literal["mp", "uni", "external_launcher"] = "mp" if shape.ranks > 1 else "uni"
    return ParallelSection(
        tensor=shape.tensor,
        stages=shape.stages,
        engines=engines,
        backend="external_launcher" if backend == "external_launcher" else kind,
        step_limit_s=section.rank_timeout_seconds,
    )
