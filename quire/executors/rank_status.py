"""Rank status: what each rank of a model does, in memory that the engine and its ranks share.

A rank writes its own row; the engine reads all. Each field is a 64-bit number, stored at once. A
rank that hangs or dies cannot describe itself: its last step and collective are here.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

from quire.distributed.counted_collectives import COUNTED_COLLECTIVES

_ERROR_BYTES = 2048


class RankStatus(NamedTuple):
    """The fields of one rank. Messages are steps and calls, numbered from 1."""

    begun: int = 0  # number of the last message that it began
    done: int = 0  # number of the last message that it finished
    failed: int = 0  # number of the last message that raised
    preparing_since: int = 0  # ns: it compiles a kernel or captures a graph; 0: it does not
    collectives: int = 0  # how many it has begun
    collective: int = 0  # index of the last one's name

    @property
    def last_collective(self) -> str:
        return f"{self.collectives} ({COUNTED_COLLECTIVES[self.collective]})"

    @property
    def waits_for_stage(self) -> bool:
        """Whether it exchanges something with another pipeline stage now."""
        return COUNTED_COLLECTIVES[self.collective] in ("send", "receive")


_FIELDS = {name: i for i, name in enumerate(RankStatus._fields)}
_ROW_WORDS = 8  # a cache line: no two ranks write the same
_BEGUN, _DONE, _FAILED = (_FIELDS[name] for name in ("begun", "done", "failed"))
_PREPARING = _FIELDS["preparing_since"]
_COLLECTIVES = _FIELDS["collectives"]


def create_status_page(ranks: int) -> int:
    """Return the descriptor of a new page, a file without a name. The caller must close it."""
    descriptor = os.memfd_create("quire-status")
    os.truncate(descriptor, ranks * (8 * _ROW_WORDS + _ERROR_BYTES))
    return descriptor


class RankStatusPage:
    """The page of so many ranks, as one process has it."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        rows = 8 * _ROW_WORDS * ranks
        memory = memoryview(mmap.mmap(descriptor, rows + _ERROR_BYTES * ranks))
        self._words = memory[:rows].cast("q")
        self._errors = [
            memory[at : at + _ERROR_BYTES] for at in range(rows, len(memory), _ERROR_BYTES)
        ]
        self.ranks = ranks

    def read(self, rank: int) -> RankStatus:
        at = rank * _ROW_WORDS
        return RankStatus(*self._words[at : at + len(RankStatus._fields)])

    def read_error(self, rank: int) -> str:
        """Return what the last message that raised on a rank raised there."""
        return bytes(self._errors[rank]).rstrip(b"\0").decode(errors="replace")

    def export(self, ranks: range) -> list[tuple[bytes, bytes]]:
        """Return the rows of some ranks, for another host's page."""
        words = self._words.cast("B")
        size = 8 * _ROW_WORDS
        return [
            (bytes(words[size * rank : size * (rank + 1)]), bytes(self._errors[rank]).rstrip(b"\0"))
            for rank in ranks
        ]

    def put(self, rank: int, row: bytes, error: bytes) -> None:
        """Overwrite the row of a rank with one that export() returned elsewhere."""
        self._errors[rank][:] = error[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")
        at = rank * _ROW_WORDS
        self._words[at : at + _ROW_WORDS] = memoryview(row).cast("q")

    def writer(self, rank: int) -> RankStatusWriter:
        at = rank * _ROW_WORDS
        return RankStatusWriter(self._words[at : at + _ROW_WORDS], self._errors[rank])


class RankStatusWriter:
    """Writes the row of one rank."""

    def __init__(self, words: memoryview, error: memoryview) -> None:
        self._words = words
        self._error = error

    @property
    def collective_words(self) -> memoryview:
        """Where the rank's collectives are counted: see quire.distributed.collectives."""
        return self._words[_COLLECTIVES : _COLLECTIVES + 2]

    def begin(self, number: int) -> None:
        self._words[_BEGUN] = number

    def finish(self, number: int) -> None:
        self._words[_DONE] = number

    def fail(self, number: int, error: BaseException) -> None:
        if self._words[_FAILED] <= self._words[_DONE]:  # later ones fail because of the first
            data = f"{type(error).__name__}: {error}".encode()[:_ERROR_BYTES]
            self._error[:] = data.ljust(_ERROR_BYTES, b"\0")
        self._words[_FAILED] = number

    def mark_preparing(self, whether: bool) -> None:
        """The rank begins to compile or to capture, or has finished: no step deadline applies."""
        self._words[_PREPARING] = time.monotonic_ns() if whether else 0
