"""Shared counters: the counters of this process where the other API processes can read them.

Each process has a file of numbers that it alone writes; the process that serves /metrics adds all
files up. So the result is exact in every process, a count costs one addition in memory,
and the counts of a process remain after its end. With one process there is no file.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

HEADER_BYTES = 8
"""Bytes before the numbers: a digest of their names. Others than ours are not added."""


class SharedCounters:
    """One number (a float) for each name; `cells` is written by this process's event loop only."""

    def __init__(self, names: Iterable[str], folder: Path | None = None) -> None:
        self.index_by_name = {name: i for i, name in enumerate(names)}
        self._folder = folder
        self._layout_digest = hashlib.sha256("\n".join(self.index_by_name).encode()).digest()[
            :HEADER_BYTES
        ]
        self._is_shared = folder is not None
        memory = self._allocate(HEADER_BYTES + 8 * len(self.index_by_name))
        memory[:HEADER_BYTES] = self._layout_digest
        self.values = memoryview(memory)[HEADER_BYTES:].cast("d")

    def add(self, name: str, amount: float = 1.0) -> None:
        """For what is counted seldom; others remember the place."""
        self.values[self.index_by_name[name]] += amount

    def totals(self) -> Sequence[float]:
        """Sums over all processes, by index."""
        if self._folder is None:
            return list(self.values)
        found = [self._read_file(path) for path in sorted(self._folder.glob("metrics-*.bin"))]
        if not self._is_shared:
            found.append([*self.values])
        return [sum(column) for column in zip(*(one for one in found if one))]

    def _allocate(self, size: int) -> bytearray | mmap.mmap:
        """A file with all blocks allocated: the first write to a hole on a full disk kills."""
        if self._folder is None:
            return bytearray(size)
        descriptor, path = tempfile.mkstemp(".bin", f"metrics-{os.getpid()}-", self._folder)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        except OSError as error:
            os.unlink(path)
            log.warning(
                "cannot allocate shared counters (%s): the counts of this process are not shared",
                error,
            )
            self._is_shared = False
            return bytearray(size)
        finally:
            os.close(descriptor)

    def _read_file(self, path: Path) -> list[float]:
        raw = path.read_bytes()
        if raw[:HEADER_BYTES] != self._layout_digest:
            return []
        return [*struct.unpack(f"{len(self.index_by_name)}d", raw[HEADER_BYTES:])]


class SharedHistogram:
    """Buckets and a sum on a board."""

    def __init__(self, board: SharedCounters, name: str, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._values = board.values
        self._first_index = board.index_by_name[bucket_counter_name(name, 0)]
        self._sum_index = board.index_by_name[sum_counter_name(name)]

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        cells = self._values
        cells[self._first_index + bisect_left(self.bounds, value)] += times
        cells[self._sum_index] += value * times


def histogram_counter_names(name: str, bounds: Sequence[float]) -> list[str]:
    """The numbers of a histogram, in order: each bucket, what is above them all, the sum."""
    return [*(bucket_counter_name(name, i) for i in range(len(bounds) + 1)), sum_counter_name(name)]


def bucket_counter_name(name: str, i: int) -> str:
    return f"{name} bucket {i}"


def sum_counter_name(name: str) -> str:
    return f"{name} sum"
