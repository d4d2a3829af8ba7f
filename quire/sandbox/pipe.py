"""Message pipe between a process and its worker: msgpack with a length prefix.

The buffer of a message is used again: fresh pages for some megabytes cost more than copying them.
"""

from __future__ import annotations

import socket
import struct
from typing import Generic, TypeVar

import msgspec

MAX_MESSAGE_BYTES = 1 << 30
"""Maximum size of a message."""
KEPT_BYTES = 1 << 26
"""A larger buffer is not kept for the next message."""
_SIZE = struct.Struct("!I")

W = TypeVar("W")
_encoder = msgspec.msgpack.Encoder()


class WorkerPipe(Generic[W]):
    """One end of the connection. Used by one thread at a time."""

    def __init__(self, end: socket.socket, words: msgspec.msgpack.Decoder[W]) -> None:
        self._socket = end
        self._decoder = words
        self._prefix = bytearray(_SIZE.size)
        self._size: int | None = None  # of the message that is being received; None: not known yet
        self._filled = 0  # received bytes of the prefix, or of the message
        self._buffer = bytearray()

    def send(self, word: W) -> None:
        """Send a message. Raises OSError if the other end is closed."""
        data = _encoder.encode(word)
        self._socket.settimeout(None)
        self._socket.sendall(_SIZE.pack(len(data)))
        self._socket.sendall(data)

    def receive(self, timeout: float | None = None) -> W | None:
        """Return the next message. None: the other end is closed, or its message is invalid.

        Raises: TimeoutError; the bytes received until then are kept.
        """
        self._socket.settimeout(timeout)
        if self._size is None:
            if not self._fill(self._prefix, len(self._prefix)):
                return None
            (size,) = _SIZE.unpack(self._prefix)
            if size > MAX_MESSAGE_BYTES:
                return None
            if size > len(self._buffer):
                self._buffer = bytearray(size)
            self._size = size
        if not self._fill(self._buffer, self._size):
            return None
        try:
            with memoryview(self._buffer) as view, view[: self._size] as message:
                return self._decoder.decode(message)
        except (msgspec.DecodeError, ValueError, RecursionError):  # no UTF-8; too deep
            return None
        finally:
            self._size = None
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
