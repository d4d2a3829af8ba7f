"""What the engine must know of the machine it runs on. One file per kind of device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Of one device, in bytes."""

    total: int
    free: int  # available to a new allocation now
