"""Message pipe between a process and its worker: msgpack with a length prefix.

The buffer of a message is used again: fresh pages for some megabytes cost more than copying them.
Large arrays of a message travel behind it, each from its own memory into memory of its own.

    size of the message, number of arrays | size of each array | message | arrays
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar, cast, runtime_checkable

import msgspec

MAX_MESSAGE_BYTES = 1 << 30
"""Maximum size of a message."""
KEPT_BYTES = 1 << 26
"""A larger buffer is not kept for the next message."""
_PREFIX, _SIZE = struct.Struct("!II"), struct.Struct("!Q")

W = TypeVar("W")
_encoder = msgspec.msgpack.Encoder()


@runtime_checkable
class HasArrays(Protocol):
    """A message with large arrays."""

    def detached(self) -> tuple[object, Sequence[bytes | memoryview]]:
        """Return it without its arrays, and these."""
        ...

    def attached(self, arrays: Iterator[memoryview]) -> object:
        """Return it with its arrays again. Raises ValueError if one is missing."""
        ...


class WorkerPipe(Generic[W]):
    """One end of the connection. Used by one thread at a time."""

    def __init__(self, end: socket.socket, words: msgspec.msgpack.Decoder[W]) -> None:
        self._socket = end
        self._decoder = words
        self._prefix = bytearray(_PREFIX.size)
        self._sizes: tuple[int, int] | None = None  # of the sizes of arrays and of the message that
        # are being received; None: not known yet
        self._arrays: list[bytearray] | None = None  # behind that message; None: not known yet
        self._received = 0  # of these
        self._filled = 0  # received bytes of the prefix, the message or an array
        self._buffer = bytearray()

    def send(self, word: W) -> None:
        """Send a message. Raises OSError if the other end is closed."""
        message, arrays = word.detached() if isinstance(word, HasArrays) else (word, ())
        data = _encoder.encode(message)
        self._socket.settimeout(None)
        self._socket.sendall(_PREFIX.pack(len(data), len(arrays)))
        self._socket.sendall(b"".join([_SIZE.pack(len(one)) for one in arrays]))
        for one in (data, *arrays):
            self._socket.sendall(one)

    def receive(self, timeout: float | None = None) -> W | None:
        """Return the next message. None: the other end is closed, or its message is invalid.

        Raises: TimeoutError; the bytes received until then are kept.
        """
        self._socket.settimeout(timeout)
        if self._sizes is None:
            if not self._fill(self._prefix, len(self._prefix)):
                return None
            size, count = _PREFIX.unpack(self._prefix)
            self._sizes = count * _SIZE.size, size
            if sum(self._sizes) > MAX_MESSAGE_BYTES:
                return None
            if sum(self._sizes) > len(self._buffer):
                self._buffer = bytearray(sum(self._sizes))
        table, size = self._sizes
        if self._arrays is None:
            if not self._fill(self._buffer, table + size):
                return None
            sizes = [one for (one,) in _SIZE.iter_unpack(self._buffer[:table])]
            if sum(sizes) > MAX_MESSAGE_BYTES:
                return None
            self._arrays = [bytearray(one) for one in sizes]
        for one in self._arrays[self._received :]:
            if not self._fill(one, len(one)):
                return None
            self._received += 1
        return self._decode(table, size, self._arrays)

    def _decode(self, start: int, size: int, arrays: list[bytearray]) -> W | None:
        """Return what was received; None if it is invalid."""
        try:
            with memoryview(self._buffer) as view, view[start : start + size] as message:
                word = self._decoder.decode(message)
            views = (memoryview(one).toreadonly() for one in arrays)
            return cast(W, word.attached(views)) if isinstance(word, HasArrays) else word
        except (msgspec.DecodeError, ValueError, RecursionError):  # no UTF-8; too deep
            return None
        finally:
            self._sizes = self._arrays = None
            self._received = 0
            if len(self._buffer) > KEPT_BYTES:
                self._buffer = bytearray()

    def _fill(self, buffer: bytearray, size: int) -> bool:
        """Receive the rest of `size` bytes. Returns False if the other end is closed."""
        with memoryview(buffer) as view:
            while self._filled < size:
                try:
                    count = self._socket.recv_into(view[self._filled : size])
                except ConnectionError:
                    return False
                if not count:
                    return False
                self._filled += count
        self._filled = 0
        return True

    def close(self) -> None:
        self._socket.close()
