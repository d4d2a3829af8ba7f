"""Device facts: the devices that an engine would run on, with their memory. Without torch."""

from __future__ import annotations

from quire import env
from quire.config.facts import DeviceFacts
from quire.config.options import Options
from quire.errors import ConfigError
from quire.platform import cpu, cuda


def device_facts(options: Options, environment: env.Env) -> DeviceFacts:
    """The requested device, or the best available, with its free memory. Raises ConfigError."""
    threads = environment.num_threads or cpu.available_cores()
    section = options.device.device
    if section == "cuda" or (section == "auto" and cuda.available()):
        return _gpu_facts(options, threads)
    memory = cpu.memory()
    parallel = options.parallel  # engines and their ranks share the machine's memory
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    ranks = max(1, ranks // parallel.nnodes) * parallel.data_parallel_size
    return DeviceFacts(
        kind=cpu.name,
        total_bytes=memory.total // ranks,
        free_bytes=memory.free // ranks,
        threads=threads,
        count=max(8, cpu.available_cores()),  # eight also on fewer cores, for tests
    )


def _gpu_facts(options: Options, threads: int) -> DeviceFacts:
    """Return the first GPU, with the memory of the tightest of those that ranks would use.

    Raises ConfigError if these are of several kinds: every rank runs the same kernels.
    """
    first, section = cuda.device_properties(), options.parallel
    ranks = section.tensor_parallel_size * section.pipeline_parallel_size
    ranks *= section.data_parallel_size // section.num_engines
    used = range(min(ranks, first.device_count))
    for index in used:
        other = cuda.device_properties(index)
        if (other.name, other.capability) != (first.name, first.capability):
            raise ConfigError(
                f"{ranks} ranks: cuda:0 is a {first.name} and cuda:{index} a {other.name}; ranks "
                "need GPUs of one kind (choose them with CUDA_VISIBLE_DEVICES)"
            )
    memory = [cuda.memory(index) for index in used]
    return DeviceFacts(
        kind=cuda.name,
        total_bytes=min(one.total for one in memory),
        free_bytes=min(one.free for one in memory),
        name=first.name,
        threads=threads,
        count=first.device_count,
        capability=first.capability,
        host_free_bytes=cpu.memory().free,
    )
