"""Whom an engine runs, written where its death cannot take it: a page that its starter has too.

Who was aboard when an engine died may be what it died of; who only waited cannot. Aboard is who
runs, and whose grammar is being made. Written before somebody is taken aboard, so the list may name
some who have left, and misses nobody.

    which of the two halves counts | length, ids | length, ids

The half that does not count is written, then it counts: a death in between leaves the other.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from typing import IO

HALF_BYTES = 1 << 20
"""Bytes of ids; pages of it that nobody writes take no memory."""
LIST_OVERFLOW = 0xFFFF_FFFF
"""As a length: there were too many to write."""
_LENGTH = struct.Struct("<I")


def create_running_list() -> IO[bytes]:
    """A file that has no name, in memory: on a disk that is full, writing to one kills who writes.

    Whoever made it closes it.
    """
    made = os.fdopen(os.memfd_create("quire-aboard"), "r+b")
    os.truncate(made.fileno(), 1 + 2 * HALF_BYTES)
    return made


class RunningListWriter:
    """Of the engine: its thread alone writes."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 1 + 2 * HALF_BYTES)

    def write(self, request_ids: Iterable[str]) -> None:
        """These are aboard from now on."""
        half = 1 - self._memory[0]
        at = 1 + half * HALF_BYTES
        data = "\n".join(dict.fromkeys(request_ids)).encode()
        fits = len(data) <= HALF_BYTES - _LENGTH.size
        if fits:
            self._memory[at + _LENGTH.size : at + _LENGTH.size + len(data)] = data
        _LENGTH.pack_into(self._memory, at, len(data) if fits else LIST_OVERFLOW)
        self._memory[0] = half


def read_running_list(file: IO[bytes]) -> list[str] | None:
    """Who was aboard. None: it may be any."""
    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        at = 1 + memory[0] * HALF_BYTES
        (length,) = _LENGTH.unpack_from(memory, at)
        if length == LIST_OVERFLOW:
            return None
        data = memory[at + _LENGTH.size : at + _LENGTH.size + length]
    return data.decode().split("\n") if data else []
