"""Facts of the machine that every kind of device reports. Each kind has a file of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes."""

    total: int
    free: int  # available to a new allocation now
