"""Devices of the engines of one server: each has its own GPUs, or its share of the processor."""

from __future__ import annotations

from quire import env
from quire.config.options import Options
from quire.errors import ConfigError
from quire.platform import cpu, cuda


def engine_environments(options: Options) -> list[dict[str, str]]:
    """Return the environment variables of each engine's process, beside those of this one.

    Raises ConfigError if there are fewer GPUs than the engines need.
    """
    engines = options.parallel.num_engines
    if engines == 1:
        return [{}]
    device = options.device.device
    if device == "cuda" or (device == "auto" and cuda.available()):
        return _gpus_of_engines(engines, options.parallel.tensor_parallel_size)
    threads = env.read().num_threads or cpu.available_cores()
    return [{"OMP_NUM_THREADS": str(max(1, threads // engines))}] * engines


def _gpus_of_engines(engines: int, each: int) -> list[dict[str, str]]:
    count = cuda.device_properties().device_count
    names = (env.read().visible_gpus or tuple(str(i) for i in range(count)))[:count]
    if len(names) < engines * each:
        product = f"data_parallel_size={engines} x tensor_parallel_size={each}"
        raise ConfigError(
            f"{product} needs {engines * each} GPUs, and {len(names)} are visible; use at most "
            f"data_parallel_size={len(names) // each}"
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[i * each : (i + 1) * each])} for i in range(engines)
    ]
