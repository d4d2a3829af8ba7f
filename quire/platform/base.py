"""What the engine must know of the machine it runs on. One file per kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one device, in bytes."""

    total: int
    free: int  # available to a new allocation now


class Platform(Protocol):
    """A kind of device. Module-level functions of platform/<name>.py satisfy it."""

    name: str

    def memory(self) -> Memory: ...

    def threads(self) -> int:
        """How many CPU threads the kernels may use."""
        ...
