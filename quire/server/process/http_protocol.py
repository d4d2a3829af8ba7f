"""HTTP/1 protocol of uvicorn (httptools) with the rules that uvicorn leaves out.

    HTTP version         1.0 or 1.1, else 505; answers to 1.0 are not chunked, the close ends them
    Host                 one, with a valid value, else 400; 1.0 may leave it out
    Expect               100-continue, else 417
    trailers             dropped: they come after all checks of the head
    size and time        too large a head or trailer is 400; too slow a request is disconnected
    half-closed clients  get their answer (`Protocol.eof_received`)
    file descriptors     when few are left, idle connections are closed, then new ones get 503;
                         TLS handshakes count as idle connections (`TlsHandshake`)

`build_http_protocol` makes the class for uvicorn's config; nothing else depends on uvicorn's
protocol classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.errors import error_response
from quire.server.options import ServerOptions
from quire.server.process.listen_sockets import normalize_root_path

HEADER_TIMEOUT_S = 20.0
"""Time for the head of a request, from the connection or its first byte; also for a handshake."""
BODY_S = 120.0
"""Time for the rest of it."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_PROBE_S, MAX_PROBE_S = 0.05, 5.0
"""Time between two interim answers to a half-closed client: doubled."""
MAX_BACKLOG = 2048
"""Connections that wait in the kernel for one listening socket."""
RETRY_AFTER_S = 1

_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
_INVALID = "Invalid HTTP request received."


class HeaderLimitExceeded(Exception):
    """The head is over a limit. httptools turns it into its own error, and uvicorn into a 400."""


def listen_backlog() -> int:
    """Length of the kernel's queue: the event loop accepts all of it before it handles one."""
    return min(MAX_BACKLOG, max(8, _max_open_files() // 16))


def max_connections() -> int:
    """Connections that leave descriptors for all else: files, workers, one queue of new ones."""
    limit = _max_open_files()
    return max(8, limit - len(os.listdir("/dev/fd")) - limit // 8)


def _max_open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class ConnectionLimit:
    """Bounds the connections of a process. Idle ones (no whole head is there) go first."""

    def __init__(self, count_max: Callable[[], int]) -> None:
        """count_max: called at the first connection, when the process has its other files."""
        self._count_max = count_max
        self._max: int | None = None
        self._idle: dict[Any, None] = {}  # protocols, the longest idle first

    def admit(self, one: Any, open_count: int) -> bool:
        """Take a new connection. False: there is no room, and no other is idle."""
        if self._max is None:
            self._max = self._count_max()
        self._idle[one] = None
        if open_count <= self._max:
            return True
        oldest = next(iter(self._idle))
        if oldest is one:
            return False
        self.mark_busy(oldest)
        oldest.drop()
        return True

    def mark_idle(self, one: Any) -> None:
        """Count a connection as idle: it waits for a request."""
        self._idle[one] = None

    def mark_busy(self, one: Any) -> None:
        """Count a connection as idle no more: it has a request, or is closed."""
        self._idle.pop(one, None)


def build_http_protocol(options: ServerOptions) -> type[HttpToolsProtocol]:
    """The protocol class of uvicorn's config."""
    most_bytes, most = options.h11_max_incomplete_event_size, options.h11_max_header_count
    limit = ConnectionLimit(lambda: max_connections())
    prefix = normalize_root_path(options.root_path)

    class Protocol(HttpToolsProtocol):
        """One connection. _head: bytes of the current head or trailer, None within a body.

        _in_trailer: the head is whole, so further headers are those of a trailer.
        _timeout: closes the connection in a while; None while nothing is to come.
        _refused: why no request is answered.
        """

        connection_limit = limit
        _head: int | None = 0
        _in_trailer = False
        _timeout: asyncio.TimerHandle | None = None
        _refused: HTTPException | None = None

        def __init__(
            self, *given: Any, handshake: TlsHandshake | None = None, **named: Any
        ) -> None:
            """handshake: the one that is done when the connection is made."""
            super().__init__(*given, **named)
            self._handshake = handshake

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            if self._handshake is not None:
                self._handshake.leave()
            super().connection_made(transport)
            self._wait(HEADER_TIMEOUT_S)
            if not limit.admit(self, len(self.connections)):
                retry = {"Retry-After": str(RETRY_AFTER_S)}
                message = "the server has too many connections: try again later"
                self._refused = HTTPException(503, message, retry)

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait(None)
            limit.mark_busy(self)
            super().connection_lost(exc)

        def drop(self) -> None:
            """Close an idle connection, at once if all was sent."""
            transport = self.transport
            (transport.close if transport.get_write_buffer_size() else transport.abort)()

        def _wait(self, seconds: float | None) -> None:
            if self._timeout is not None:
                self._timeout.cancel()
            self._timeout = None
            if seconds is not None:
                self._timeout = self.loop.call_later(seconds, self.transport.close)

        # -- what comes -------------------------------------------------------------------------

        def data_received(self, data: bytes) -> None:
            if self._head is not None:
                self._head += len(data)
            super().data_received(data)
            if self._head is not None and self._head > most_bytes and self.parser is not None:
                self.send_400_response(_INVALID)

        def eof_received(self) -> bool:  # type: ignore[override]
            """The client sends no more: either it waits for the answer (half-closed), or it is
            gone. An interim answer (100) shows which: a client that is gone resets the connection.

            HTTP/1.0 and TLS have no such answer, and a stream that began needs none: there it is
            gone. True: keep the connection.
            """
            cycle = self.cycle
            if cycle is None or cycle.more_body or cycle.response_started or self._head:
                return False
            if self.scheme == "https" or cycle.scope["http_version"] != "1.1":
                return False
            cycle.keep_alive = False
            self._probe(cycle, FIRST_PROBE_S)
            return True

        def _probe(self, cycle: RequestResponseCycle, again_s: float) -> None:
            if cycle.response_started or self.transport.is_closing():
                return
            self.transport.write(CONTINUE)
            self.loop.call_later(again_s, self._probe, cycle, min(2 * again_s, MAX_PROBE_S))

        # -- what is parsed ---------------------------------------------------------------------

        def on_message_begin(self) -> None:
            if self._timeout is None:  # else it runs since the connection was made
                self._wait(HEADER_TIMEOUT_S)
            super().on_message_begin()
            self.scope["root_path"] = prefix  # uvicorn's own would be put before every path

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_trailer:
                return
            super().on_header(name, value)
            if len(self.headers) > most:
                raise HeaderLimitExceeded

        def on_headers_complete(self) -> None:
            self._head, self._in_trailer = None, True
            self._wait(BODY_S)
            limit.mark_busy(self)
            super().on_headers_complete()

        def on_chunk_header(self) -> None:
            """The size of a chunk is there; if it is 0, a trailer may follow."""
            self._head = 0

        def on_body(self, body: bytes) -> None:
            self._head = None
            super().on_body(body)

        def on_message_complete(self) -> Any:
            self._head, self._in_trailer = 0, False
            self._wait(None)
            return super().on_message_complete()

        # -- what is answered -------------------------------------------------------------------

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            refused = self._refused or _refusal(cycle.scope)  # type: ignore[arg-type]
            if refused is not None:
                headers = {**(refused.headers or {}), "Connection": "close"}
                app = error_response(
                    HTTPException(refused.status_code, refused.detail, headers),
                    cycle.scope,  # type: ignore[arg-type]
                )
            if cycle.scope["http_version"] == "1.0":
                cycle.waiting_for_100_continue = False
                app = _end_with_connection(cycle, app)
            super()._start_asgi_task(cycle, app)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.pipeline and not self.transport.is_closing():
                limit.mark_idle(self)

    return Protocol


class TlsHandshake(asyncio.Protocol):
    """A TCP connection until its TLS handshake is done; then the connection is a `Protocol`'s.

    Event loops that accept TLS by themselves make no protocol before, so that nothing could count
    the connection or close it in favour of another.
    """

    def __init__(
        self, protocol_class: Any, context: ssl.SSLContext, server_state: Any, **named: Any
    ) -> None:
        """protocol_class: of build_http_protocol. The others are uvicorn's arguments."""
        self._make_protocol = partial(
            protocol_class, server_state=server_state, handshake=self, **named
        )
        self._context = context
        self._limit: ConnectionLimit = protocol_class.connection_limit
        self._connections: set[Any] = server_state.connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # loop.start_tls() would lose what uvloop reads before it is called
        own = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        transport.abort()
        own.setblocking(False)
        self._socket = own
        self._connections.add(self)
        self._limit.admit(self, len(self._connections))  # without room, the request gets 503
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    async def _shake_hands(self) -> None:
        with contextlib.suppress(OSError):  # it failed or took too long, or the client is gone
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                self._socket,
                ssl=self._context,
                ssl_handshake_timeout=HEADER_TIMEOUT_S,
            )
        self.leave()

    def drop(self) -> None:
        """Close it: the handshake fails."""
        self.leave()
        with contextlib.suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    shutdown = drop
    """What uvicorn calls when the server ends."""

    def leave(self) -> None:
        """Count it no more. Harmless when called again."""
        self._connections.discard(self)
        self._limit.mark_busy(self)


def _refusal(scope: Scope) -> HTTPException | None:
    """Why HTTP itself forbids to serve a request with this head."""
    version = scope["http_version"]
    if version not in ("1.0", "1.1"):
        return HTTPException(505, f"HTTP/{version} is not supported: send HTTP/1.1")
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return HTTPException(400, f"a request must have one Host header, got {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        return HTTPException(400, f"Host must be a name and a port, got {hosts[0]!r:.80}")
    expected = [value for name, value in scope["headers"] if name == b"expect"]
    if any(value.lower() != b"100-continue" for value in expected):
        return HTTPException(417, f"Expect must be 100-continue, got {expected[0]!r:.80}")
    return None


def _end_with_connection(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The app for a client that reads no chunks: an answer without a length ends with the
    connection.
    """

    async def unchunked(scope: Scope, receive: Receive, send: Send) -> None:
        is_open_ended = False

        async def send_unchunked(message: Message) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                if b"content-length" not in names:
                    is_open_ended, cycle.chunked_encoding = True, False
            elif is_open_ended:  # uvicorn compares what comes with a length that was announced
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return unchunked
