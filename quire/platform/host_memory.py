"""Limits of host memory besides the machine's: control groups and resource limits.

A process is in one group of each hierarchy (/proc/self/cgroup), and the limits of all groups above
it hold as well. Version 1 has a hierarchy for memory, version 2 one for everything; a machine may
have both. Page cache that can be dropped at once does not count as used.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_PROC = Path("/proc/self")
UNLIMITED = 1 << 62
"""Version 1 writes a number above this for no limit."""
_FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
}
"""File system -> file of the limit, file of what is used, line of memory.stat to subtract."""


def host_memory_limits() -> Iterator[tuple[int, int]]:
    """Limit and use in bytes, of each group on the path that has a limit, and of each rlimit."""
    for kind, folder, top in _group_folders():
        limit_file, used_file, cache_line = _FILES[kind]
        for one in (folder, *folder.parents):
            limit = _read_number(one / limit_file)
            used = _read_number(one / used_file)
            if limit is not None and used is not None and limit < UNLIMITED:
                yield limit, max(used - _read_stat(one / "memory.stat", cache_line), 0)
            if one == top:
                break
    process = psutil.Process().memory_info()
    for number, used in ((resource.RLIMIT_AS, process.vms), (resource.RLIMIT_DATA, process.data)):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            yield soft, int(used)


def _group_folders() -> Iterator[tuple[str, Path, Path]]:
    """File system, folder of this process's group, and the mount point, of each hierarchy."""
    groups: dict[str, str] = {}
    for line in _read_lines(_PROC / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups["cgroup2"] = path
        elif "memory" in controllers.split(","):
            groups["cgroup"] = path
    for line in _read_lines(_PROC / "mountinfo"):
        before, _, after = line.partition(" - ")
        (root, mount), (kind, _, options) = before.split()[3:5], after.split(maxsplit=2)
        is_memory = kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))
        if kind not in groups or not is_memory:
            continue
        top, inside = Path(mount), PurePosixPath(groups[kind])
        # A container may see the path on its host, of which it has the end mounted
        inner = inside.relative_to(root) if inside.is_relative_to(root) else PurePosixPath()
        folder = top / inner
        yield kind, folder if folder.is_dir() else top, top


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_number(path: Path) -> int | None:
    """The number in a file; None if there is no such file or it holds "max"."""
    text = "".join(_read_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _read_stat(path: Path, name: str) -> int:
    for line in _read_lines(path):
        word, _, number = line.partition(" ")
        if word == name:
            return int(number)
    return 0
