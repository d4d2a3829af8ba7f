"""Memory record: keeps what the largest step of an engine needed, for later starts.

It is a file beside the manifest of the kernels, whose key covers model, config, GPU and code; a
start that finds it does not run the largest step again to measure it. The start still allocates
what the step allocates (warmup.capture_graphs): a wrong record fails there and is measured again.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from quire.engine.startup.warmup import PeakMemory
from quire.platform import cuda
from quire.platform.kernel_store import write_whole


class MemoryRecord(msgspec.Struct, frozen=True):
    """Bytes beyond weights and cache, as measured on a device of this name and size."""

    device: str
    total_bytes: int
    reserved_bytes: int
    captured_bytes: int
    buffer_bytes: int  # of scheduler and executor
    overhead_bytes: int  # of the driver and the libraries


def read_record(path: Path) -> MemoryRecord | None:
    """Return the record, if it was measured on such a device."""
    facts = cuda.device_properties()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=MemoryRecord)
    except (OSError, msgspec.MsgspecError):
        return None
    same = (found.device, found.total_bytes) == (facts.name, facts.total_bytes)
    return found if same else None


def write_record(
    path: Path, peak: PeakMemory, buffer_bytes: int, overhead_bytes: int
) -> MemoryRecord:
    """Write and return a record of this device. A folder that cannot be written to is no error."""
    facts = cuda.device_properties()
    record = MemoryRecord(
        facts.name,
        facts.total_bytes,
        peak.reserved_bytes,
        peak.captured_bytes,
        buffer_bytes,
        overhead_bytes,
    )
    with contextlib.suppress(OSError):
        write_whole(path, msgspec.json.encode(record))
    return record
