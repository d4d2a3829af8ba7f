"""Shared-memory broadcast: one process sends numbered messages to other processes through a ring.

    counters | block 0 | block 1 | ...        counters: blocks written, and blocks read by reader i
    block    = header (length of the message, its number, place in it, checksum) and a piece of it

The memory is a file without a name (memfd) that child processes inherit: it ends with the last of
them however they end, and no limit of /dev/shm applies. A message of any length passes, in several
blocks; the writer waits while the ring is full.

A reader first spins, if it may, and then sleeps in the kernel. It gives up the interpreter's lock
in each turn: a thread that waits for a GPU's results must get it at once. The writer adds to the
reader's eventfd after each message, always, and a reader resets its eventfd before it compares
counters: so no wake-up can be lost, and an idle reader uses no processor.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from quire.errors import ConfigError, EngineError

BLOCK_BYTES = 64 << 10
STEP_BLOCKS = 64
"""Blocks of a ring for steps: eight steps of 512 KiB, which is a prompt of 128k tokens."""
ANSWER_BLOCKS = 8
"""Blocks of a ring for answers, which are short."""
SPIN_S = 0.01
"""Seconds for which a reader spins: more than most decode steps take, on all stages together."""
FULL_POLL_S = 0.0002
"""Interval in which the writer looks for room in a full ring."""
CHECKSUM_ATTEMPTS = 1000
"""Reads of a block whose content is not visible yet: some processors reorder stores."""

_LINE = 8  # words of a cache line: no two counters share one
_PLACE = struct.Struct("=qqq")  # length of the message, its number, where the piece begins
_CHECKSUM = struct.Struct("=Q")
_HEADER_BYTES = _PLACE.size + _CHECKSUM.size
_PIECE_BYTES = BLOCK_BYTES - _HEADER_BYTES


class RingHandle(msgspec.Struct, frozen=True):
    """File descriptors of a ring, as its creator and its child processes have them."""

    memory_fd: int
    wake_fds: tuple[int, ...]  # eventfds, one for each reader
    blocks: int

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.memory_fd, *self.wake_fds)

    @property
    def counter_bytes(self) -> int:
        return 8 * _LINE * (1 + len(self.wake_fds))

    @property
    def total_bytes(self) -> int:
        return self.counter_bytes + self.blocks * BLOCK_BYTES

    def renumbered(self, numbers: Mapping[int, int]) -> RingHandle:
        """Return the handle of a process that has these descriptors under other numbers."""
        wake_fds = tuple(numbers.get(fd, fd) for fd in self.wake_fds)
        return RingHandle(numbers.get(self.memory_fd, self.memory_fd), wake_fds, self.blocks)

    def close(self) -> None:
        """Close the descriptors of this process. The memory stays while a process maps it."""
        for fd in self.fds:
            with suppress(OSError):
                os.close(fd)


def create_ring(readers: int, blocks: int) -> RingHandle:
    """Create a ring, with its memory set aside. Raises ConfigError if there is not so much."""
    memory_fd = os.memfd_create("quire-ring")
    handle = RingHandle(memory_fd, tuple(os.eventfd(0) for _ in range(readers)), blocks)
    try:
        os.posix_fallocate(memory_fd, 0, handle.total_bytes)
    except OSError as error:
        handle.close()
        raise ConfigError(
            f"no {handle.total_bytes} bytes of shared memory for messages to {readers} ranks "
            f"({error.strerror}): free memory, raise the memory limit of the container, or lower "
            "tensor_parallel_size"
        ) from error
    return handle


class _Ring:
    def __init__(self, handle: RingHandle) -> None:
        self._handle = handle
        self._mapping = mmap.mmap(handle.memory_fd, handle.total_bytes)
        self._memory = memoryview(self._mapping)
        self._counters = self._memory[: handle.counter_bytes].cast("q")
        self._blocks = [
            self._memory[at : at + BLOCK_BYTES]
            for at in range(handle.counter_bytes, handle.total_bytes, BLOCK_BYTES)
        ]

    def close(self) -> None:
        """Unmap the memory, also where an object still refers to this one."""
        for view in (*self._blocks, self._counters, self._memory):
            view.release()
        self._mapping.close()


class RingWriter(_Ring):
    """The writer's end. One thread at a time."""

    def __init__(self, handle: RingHandle) -> None:
        super().__init__(handle)
        self._read_indexes = [_LINE * (1 + i) for i in range(len(handle.wake_fds))]
        self._written = 0

    def send(self, number: int, data: bytes, check: Callable[[], object] | None = None) -> None:
        """Send a message to all readers; wait while the ring is full.

        check: called while it waits; may raise because a reader is gone. It must read what the
        readers send back meanwhile, if they wait until there is room for that.
        """
        view = memoryview(data)
        for at in range(0, len(data) or 1, _PIECE_BYTES):
            place = _PLACE.pack(len(data), number, at)
            self._write_block(place, view[at : at + _PIECE_BYTES], check)
            for fd in self._handle.wake_fds:
                os.eventfd_write(fd, 1)

    def _write_block(
        self, place: bytes, piece: memoryview, check: Callable[[], object] | None
    ) -> None:
        written, counters = self._written, self._counters
        oldest = written - len(self._blocks)
        for index in self._read_indexes:
            while counters[index] <= oldest:
                if check is not None:
                    check()
                time.sleep(FULL_POLL_S)
        block = self._blocks[written % len(self._blocks)]
        block[_HEADER_BYTES : _HEADER_BYTES + len(piece)] = piece
        block[:_HEADER_BYTES] = place + _CHECKSUM.pack(_checksum(place, piece))
        self._written = counters[0] = written + 1


class RingReader(_Ring):
    """One reader's end. One thread at a time."""

    def __init__(self, handle: RingHandle, reader: int, spin_s: float = 0.0) -> None:
        """spin_s: seconds to spin before sleeping. 0 where processes share the cores."""
        super().__init__(handle)
        self._index = _LINE * (1 + reader)
        self._wake_fd = handle.wake_fds[reader]
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._read = self._counters[self._index]
        self._partial = bytearray()  # of a message of several blocks, if the wait was interrupted
        self._spin_s = spin_s

    def receive(self, check: Callable[[], None] | None = None) -> tuple[int, bytes]:
        """Wait for the next message. Returns its number and content.

        check: called before each sleep and after each wake-up; may raise to end the wait.
        Raises EngineError if the memory was overwritten.
        """
        while True:
            self._wait(check)
            length, number, piece = self._read_block(len(self._partial))
            if length == len(piece):
                return number, piece
            self._partial += piece
            if length == len(self._partial):
                data, self._partial = bytes(self._partial), bytearray()
                return number, data

    def fileno(self) -> int:
        """A descriptor that is readable when take() should be called."""
        return self._wake_fd

    def take(self, check: Callable[[], None] | None = None) -> tuple[int, bytes] | None:
        """Return the next message; None: there is none. check: as for receive()."""
        if self._poll.poll(0):
            os.eventfd_read(self._wake_fd)  # before the counters are compared, as in receive()
        return None if self._counters[0] == self._read else self.receive(check)

    def wake(self) -> None:
        """End the sleep of a waiting thread of this process: it calls its check."""
        os.eventfd_write(self._wake_fd, 1)

    def _wait(self, check: Callable[[], None] | None) -> None:
        counters, read = self._counters, self._read
        if counters[0] != read:
            return
        if self._spin_s:
            deadline = time.perf_counter() + self._spin_s
            while time.perf_counter() < deadline:
                if counters[0] != read:
                    return
                os.sched_yield()
        while True:
            if check is not None:
                check()
            # The order matters: reset, compare, sleep. A write after the reset ends the sleep.
            if self._poll.poll(0):
                os.eventfd_read(self._wake_fd)
            if counters[0] != read:
                return
            self._poll.poll()

    def _read_block(self, at: int) -> tuple[int, int, bytes]:
        """Return the length and the number of the message, and its piece that begins at `at`."""
        block = self._blocks[self._read % len(self._blocks)]
        for _ in range(CHECKSUM_ATTEMPTS):
            place = bytes(block[: _PLACE.size])
            length, number, begin = _PLACE.unpack(place)
            end = _HEADER_BYTES + max(0, min(length - at, _PIECE_BYTES))
            piece = bytes(block[_HEADER_BYTES:end])
            (checksum,) = _CHECKSUM.unpack_from(block, _PLACE.size)
            if _checksum(place, piece) == checksum and begin == at:
                break
            time.sleep(FULL_POLL_S)
        else:
            raise EngineError(
                f"message {number} of {length} bytes in shared memory has a wrong checksum: its "
                "memory was overwritten"
            )
        self._read = self._counters[self._index] = self._read + 1
        return length, number, piece


def _checksum(place: bytes, piece: bytes | memoryview) -> int:
    return zlib.crc32(piece, zlib.crc32(place))
