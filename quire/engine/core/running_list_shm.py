"""Running list: ids of the requests that an engine runs, in memory shared with its parent.

After a crash these are the suspects; requests that only waited are not. A request counts as running
while it is in a step or its grammar is being compiled. The list is written before a request starts,
so it may have some that have ended, and lacks none.

    index of the valid half | length, ids | length, ids

The writer fills the other half, then changes the index: a crash in between leaves the old one.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from typing import IO

HALF_BYTES = 1 << 20
"""Bytes of ids; pages that are not written take no memory."""
LIST_OVERFLOW = 0xFFFF_FFFF
"""Stored as a length: there were too many ids to write."""
_LENGTH = struct.Struct("<I")


def create_running_list() -> IO[bytes]:
    """A file without a name, in memory: writing to a full disk would kill the engine.

    The caller must close it.
    """
    file = os.fdopen(os.memfd_create("quire-running"), "r+b")
    os.truncate(file.fileno(), 1 + 2 * HALF_BYTES)
    return file


class RunningListWriter:
    """Writer of the list: the engine's thread alone."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 1 + 2 * HALF_BYTES)

    def write(self, request_ids: Iterable[str]) -> None:
        """Replace the list."""
        half = 1 - self._memory[0]
        at = 1 + half * HALF_BYTES
        data = "\n".join(dict.fromkeys(request_ids)).encode()
        fits = len(data) <= HALF_BYTES - _LENGTH.size
        if fits:
            self._memory[at + _LENGTH.size : at + _LENGTH.size + len(data)] = data
        _LENGTH.pack_into(self._memory, at, len(data) if fits else LIST_OVERFLOW)
        self._memory[0] = half


def read_running_list(file: IO[bytes]) -> list[str] | None:
    """The ids of the list. None: any request may run."""
    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        at = 1 + memory[0] * HALF_BYTES
        (length,) = _LENGTH.unpack_from(memory, at)
        if length == LIST_OVERFLOW:
            return None
        data = memory[at + _LENGTH.size : at + _LENGTH.size + length]
    return data.decode().split("\n") if data else []
