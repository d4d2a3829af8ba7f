"""Message pipe between a process and its worker: msgpack with a length prefix."""

from __future__ import annotations

import socket
import struct
from typing import Generic, TypeVar

import msgspec

MAX_MESSAGE_BYTES = 1 << 30
"""Maximum size of a message."""

W = TypeVar("W")
_encoder = msgspec.msgpack.Encoder()


class WorkerPipe(Generic[W]):
    """One end of the connection. Used by one thread at a time."""

    def __init__(self, end: socket.socket, words: msgspec.msgpack.Decoder[W]) -> None:
        self._socket = end
        self._decoder = words
        self._buffer = bytearray()

    def send(self, word: W) -> None:
        """Send a message. Raises OSError if the other end is closed."""
        data = _encoder.encode(word)
        self._socket.settimeout(None)
        self._socket.sendall(struct.pack("!I", len(data)))
        self._socket.sendall(data)

    def receive(self, timeout: float | None = None) -> W | None:
        """Return the next message. None: the other end is closed, or its message is invalid.

        Raises: TimeoutError; the bytes received until then are kept.
        """
        self._socket.settimeout(timeout)
        size = self._message_size()
        while size is None or len(self._buffer) < 4 + size:
            try:
                data = self._socket.recv(1 << 20)
            except ConnectionError:
                return None
            if not data:
                return None
            self._buffer += data
            size = self._message_size()
            if size is not None and size > MAX_MESSAGE_BYTES:
                return None
        try:
            with memoryview(self._buffer) as view, view[4 : 4 + size] as message:
                return self._decoder.decode(message)
        except (msgspec.DecodeError, ValueError, RecursionError):  # no UTF-8; too deep
            return None
        finally:
            del self._buffer[: 4 + size]

    def _message_size(self) -> int | None:
        return struct.unpack("!I", self._buffer[:4])[0] if len(self._buffer) >= 4 else None

    def close(self) -> None:
        self._socket.close()
