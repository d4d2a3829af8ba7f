"""HTTP/1 as uvicorn reads it by httptools, with a limit to the head of a request.

Who sends more headers, or more bytes of them, than the options allow gets a 400 and is hung up on:
the parser itself would take any number.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.options import ServerOptions


class TooLong(Exception):
    """The head is over a limit. httptools turns it into its own error, and uvicorn into a 400."""


def protocol(options: ServerOptions) -> type[HttpToolsProtocol]:
    """The protocol class of uvicorn's config."""
    most_bytes, most = options.h11_max_incomplete_event_size, options.h11_max_header_count

    class Protocol(HttpToolsProtocol):
        """One connection. _head: bytes since the request began, None once its head is whole."""

        _head: int | None = 0

        def data_received(self, data: bytes) -> None:
            if self._head is not None:
                self._head += len(data)
            super().data_received(data)
            if self._head is not None and self._head > most_bytes and self.parser is not None:
                self.send_400_response("Invalid HTTP request received.")

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            if len(self.headers) > most:
                raise TooLong

        def on_headers_complete(self) -> None:
            self._head = None
            super().on_headers_complete()

        def on_message_complete(self) -> Any:
            self._head = 0
            return super().on_message_complete()

    return Protocol
