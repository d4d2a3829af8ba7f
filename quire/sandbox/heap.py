"""Heap of a process that moves arrays of megabytes: freed memory is kept for the next one."""

from __future__ import annotations

import ctypes
from contextlib import suppress

KEPT_BYTES = 1 << 26
"""Largest array whose memory is kept, and how much the heap keeps at its end."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt(3)


def keep_freed_memory() -> None:
    """Let the next array use the memory of the last: fresh pages cost more than copying them."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
