"""Restricts a worker process permanently: it can no longer open files, sockets or processes.

On every system: no new descriptors, and no right can be regained. With Landlock (Linux 5.13, and
more from 6.7 and 6.12 on): the file system is closed to writing, linking and removing too, TCP is
closed, and no process outside can be traced or signalled. It is best effort by nature: the worker's
own language is the first defence.

Source: the kernel's description of Landlock, docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import resource
import struct

_NO_NEW_PRIVILEGES, _NOT_DUMPABLE = 38, 4  # arguments of prctl
_CREATE_RULESET, _RESTRICT_SELF = (
    444,
    446,
)  # system calls, the same on every architecture of 64 bits
_RIGHTS_BY_VERSION = ((1, 13), (2, 14), (3, 15), (5, 16))
"""Version of Landlock -> number of its file rights, each a bit."""
_NET_VERSION, _SCOPE_VERSION = 4, 6
"""First versions that restrict TCP; signals and abstract sockets."""


def restrict_process() -> int:
    """Allow no new descriptors. Returns the version of Landlock that enforces it; 0: none."""
    version = _apply_landlock()
    # Not 0: poll() of one descriptor counts as one.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, 1))
    return version


def _apply_landlock() -> int:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        prctl, syscall = libc.prctl, libc.syscall
    except (OSError, AttributeError):
        return 0  # not Linux
    prctl(_NOT_DUMPABLE, 0, 0, 0, 0)
    if prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return 0
    syscall.restype = ctypes.c_long
    version = int(syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)))
    if version < 1:
        return 0
    rights = max(count for first, count in _RIGHTS_BY_VERSION if version >= first)
    words = [(1 << rights) - 1]
    words += [3] if version >= _NET_VERSION else []
    words += [3] if version >= _SCOPE_VERSION else []
    rules = struct.pack(f"={len(words)}Q", *words)
    made = syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint(0))
    if made < 0 or syscall(_RESTRICT_SELF, ctypes.c_int(made), ctypes.c_uint(0)) != 0:
        return 0
    return version
