"""HTTP/1 protocol of uvicorn (httptools) with limits on requests.

A client that sends more headers, or more bytes of them, than the options allow gets a 400 and is
disconnected: the parser itself would take any number. A client that opens a connection and does not
send a request in time is disconnected without an answer: uvicorn would keep it for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.options import ServerOptions

HEADER_TIMEOUT_S = 20.0
"""Time for the head of a request, from the connection or its first byte."""
BODY_S = 120.0
"""Time for the rest of it."""


class HeaderLimitExceeded(Exception):
    """The head is over a limit. httptools turns it into its own error, and uvicorn into a 400."""


def build_http_protocol(options: ServerOptions) -> type[HttpToolsProtocol]:
    """The protocol class of uvicorn's config."""
    most_bytes, most = options.h11_max_incomplete_event_size, options.h11_max_header_count

    class Protocol(HttpToolsProtocol):
        """One connection. _head: bytes since the request began, None once its head is whole.

        _patience: hangs up in a while; None while nothing is to come.
        """

        _head: int | None = 0
        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait(HEADER_TIMEOUT_S)

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait(None)
            super().connection_lost(exc)

        def _wait(self, seconds: float | None) -> None:
            if self._patience is not None:
                self._patience.cancel()
            self._patience = None
            if seconds is not None:
                self._patience = self.loop.call_later(seconds, self.transport.close)

        def data_received(self, data: bytes) -> None:
            if self._head is not None:
                self._head += len(data)
            super().data_received(data)
            if self._head is not None and self._head > most_bytes and self.parser is not None:
                self.send_400_response("Invalid HTTP request received.")

        def on_message_begin(self) -> None:
            if self._patience is None:  # else it runs since the connection was made
                self._wait(HEADER_TIMEOUT_S)
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            if len(self.headers) > most:
                raise HeaderLimitExceeded

        def on_headers_complete(self) -> None:
            self._head = None
            self._wait(BODY_S)
            super().on_headers_complete()

        def on_message_complete(self) -> Any:
            self._head = 0
            self._wait(None)
            return super().on_message_complete()

    return Protocol
