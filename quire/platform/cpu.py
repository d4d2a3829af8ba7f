"""CPU device: reports memory within the container's limit, and cores within its affinity."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from quire.platform.base import DeviceMemory

name = "cpu"

_CGROUP = Path("/sys/fs/cgroup")


def memory() -> DeviceMemory:
    """Total and available bytes, the smaller of the machine's and the container's."""
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    limit, used = (
        _read_cgroup_number(_CGROUP / "memory.max"),
        _read_cgroup_number(_CGROUP / "memory.current"),
    )
    if limit is not None and used is not None:
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return DeviceMemory(total, free)


def available_cores() -> int:
    """Cores this process may run on. Hyper-threads count."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_cgroup_number(path: Path) -> int | None:
    """A number from a cgroup file; None if there is no such file or it holds "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
