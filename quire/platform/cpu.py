"""CPU device: reports memory within the container's limit, and cores within its affinity."""

from __future__ import annotations

import os

import psutil

from quire.platform.base import DeviceMemory
from quire.platform.host_memory import host_memory_limits

name = "cpu"


def memory() -> DeviceMemory:
    """Total and available bytes: the least of the machine, the control groups and the rlimits."""
    machine = psutil.virtual_memory()
    found = [(int(machine.total), int(machine.available))]
    for limit, used in host_memory_limits():
        found.append((limit, max(limit - used, 0)))
    return DeviceMemory(min(total for total, _ in found), min(free for _, free in found))


def available_cores() -> int:
    """Cores this process may run on. Hyper-threads count."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
