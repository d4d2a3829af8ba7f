"""Step arrays: large arrays of steps in memory that the engine shares with the ranks of its host.

The engine copies an array into it once; ranks read it there until they have answered the step. So
nothing encodes, checks or copies the arrays of a message, as in quire.executors.shm_broadcast.

The memory is a file without a name (memfd) that child processes inherit: it ends with the last of
them however they end, and no limit of /dev/shm applies. It is taken from the system as it is first
used, always from the beginning where no step is in flight, and is then used again.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

log = logging.getLogger(__name__)

AREA_BYTES = 256 << 20
"""Bytes of arrays of the steps in flight, at most; what is more travels in messages."""
ALIGNMENT = 64
GROWTH_BYTES = 1 << 20


class ArrayPlace(NamedTuple):
    """Where an array is, in bytes."""

    start: int
    size: int


def create_area() -> int:
    """Return the descriptor of an area, which has no memory yet."""
    fd = os.memfd_create("quire-step-arrays")
    os.ftruncate(fd, AREA_BYTES)
    return fd


class _Held(NamedTuple):
    """Space of the arrays of one message."""

    number: int
    start: int
    end: int


class StepArrayWriter:
    """The engine's end. One thread at a time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._mapping = mmap.mmap(fd, AREA_BYTES)
        self._held: deque[_Held] = deque()
        self._taken = 0  # bytes that the system has set aside
        self._may_grow = True

    def place(
        self, number: int, arrays: Sequence[bytes | memoryview]
    ) -> tuple[ArrayPlace, ...] | None:
        """Copy the arrays of a message. None: there is no space for them now.

        number: of the message, which grows; release() gives the space back.
        """
        sizes = [-(-len(one) // ALIGNMENT) * ALIGNMENT for one in arrays]
        start = self._find(sum(sizes))
        if start is None or not self._take(start + sum(sizes)):
            return None
        self._held.append(_Held(number, start, start + sum(sizes)))
        places = []
        for one, size in zip(arrays, sizes, strict=True):
            self._mapping[start : start + len(one)] = one
            places.append(ArrayPlace(start, len(one)))
            start += size
        return tuple(places)

    def release(self, number: int) -> None:
        """All ranks have answered the messages up to this one."""
        while self._held and self._held[0].number <= number:
            self._held.popleft()

    @property
    def held_messages(self) -> int:
        """How many messages have arrays here."""
        return len(self._held)

    @property
    def taken_bytes(self) -> int:
        """How much memory it has from the system."""
        return self._taken

    def close(self) -> None:
        """Unmap the memory. The descriptor stays open."""
        self._mapping.close()

    def _find(self, size: int) -> int | None:
        """The start of so much space in one piece, behind the last message's or at the start."""
        if not self._held:
            return 0 if size <= AREA_BYTES else None
        first, last = self._held[0].start, self._held[-1].end
        if last > first:
            if last + size <= AREA_BYTES:
                return last
            return 0 if size <= first else None
        return last if last + size <= first else None

    def _take(self, end: int) -> bool:
        """Have the system set memory aside up to a byte: writing to what it lacks would end us."""
        if end <= self._taken:
            return True
        if not self._may_grow:
            return False
        end = min(-(-end // GROWTH_BYTES) * GROWTH_BYTES, AREA_BYTES)
        try:
            os.posix_fallocate(self._fd, self._taken, end - self._taken)
        except OSError as error:
            self._may_grow = False
            log.warning(
                "no %d MiB of shared memory for arrays of steps (%s): they travel in messages, "
                "which takes longer; raise the memory limit of the container",
                end >> 20,
                error.strerror,
            )
            return False
        self._taken = end
        return True


class StepArrayReader:
    """A rank's end."""

    def __init__(self, fd: int) -> None:
        self._memory = memoryview(mmap.mmap(fd, AREA_BYTES, prot=mmap.PROT_READ))

    def views(self, places: Iterable[ArrayPlace]) -> list[memoryview]:
        """Return arrays, which are valid until their message is answered."""
        return [self._memory[one.start : one.start + one.size] for one in places]
