"""Device facts: the device that an engine would run on, with its memory. Without torch."""

from __future__ import annotations

from quire import env
from quire.config.facts import DeviceFacts
from quire.config.options import Options
from quire.platform import cpu, cuda


def device_facts(options: Options, environment: env.Env) -> DeviceFacts:
    """The requested device, or the best available, with its free memory. Raises ConfigError."""
    threads = environment.num_threads or cpu.available_cores()
    section = options.device.device
    if section == "cuda" or (section == "auto" and cuda.available()):
        found, now = cuda.device_properties(), cuda.memory()
        return DeviceFacts(
            kind=cuda.name,
            total_bytes=now.total,
            free_bytes=now.free,
            name=found.name,
            threads=threads,
            capability=found.capability,
            host_free_bytes=cpu.memory().free,
        )
    memory = cpu.memory()
    parallel = options.parallel  # engines and their ranks share the machine's memory
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    ranks *= parallel.data_parallel_size
    return DeviceFacts(
        kind=cpu.name,
        total_bytes=memory.total // ranks,
        free_bytes=memory.free // ranks,
        threads=threads,
        count=max(8, cpu.available_cores()),  # eight also on fewer cores, for tests
    )
