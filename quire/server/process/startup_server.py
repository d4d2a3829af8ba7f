"""Startup server: answers at the server's address until the server is ready.

Probes get the phase of the start, other requests an error to retry later. It is a thread with an
event loop of its own, so that it answers whatever the process does. It reads the head of a request
and nothing more, and closes every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time

from quire.engine.supervise.liveness import Unhealthy
from quire.server.options import ServerOptions
from quire.server.process import listen_sockets
from quire.server.routes.health import encode_problem

MAX_HEADER_BYTES = 1 << 16
HEADER_TIMEOUT_S = 5.0
"""A client has so long for its head, and afterwards to read the answer."""
MAX_BODY_BYTES = 1 << 22
"""Read and forgotten, so that the answer is not lost with the connection."""
RETRY_AFTER_S = 5
BACKLOG = 128

_CONNECTION_ERRORS = (
    OSError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
)
"""Errors of a connection that are not logged."""

STARTUP_PHASES = {
    "process": "the engine's process begins",
    "weights": "weights are being read, and the device is being prepared",
    "restart": "a process of the server begins again; no weights are read for it",
    "opening": "the server opens",
}


class StartupServer:
    """Between open() and close(). `phase` is one of PHASES, and may be set by any thread."""

    def __init__(
        self, listener: socket.socket, options: ServerOptions, *, started: bool = False
    ) -> None:
        """started: the server was ready before, in another process at this address."""
        self.phase = "restart" if started else "process"
        self._listener = listener.dup()
        self._options = options
        self._started = started
        self._opened_at = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-lobby", daemon=True)

    def open(self) -> None:
        """Answer from now on: what connects before the thread runs waits in the backlog."""
        self._listener.listen(BACKLOG)
        self._thread.start()

    def on_model_located(self) -> None:
        """Enter the phase in which the engine reads weights, unless it had read them before."""
        if not self._started:
            self.phase = "weights"

    def close(self) -> None:
        """Accept no more; what connects later waits for the server. Harmless when called again.

        The thread still answers what has connected, for as long as that may take.
        """
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._closed.wait()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            self._closed.set()

    async def _serve(self) -> None:
        context = None
        if self._options.ssl_certfile is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            listen_sockets.load_tls(context, self._options)
        server = await asyncio.start_server(
            self._answer,
            sock=self._listener,
            limit=MAX_HEADER_BYTES,
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=None if context is None else HEADER_TIMEOUT_S,
        )
        await self._closing.wait()
        server.close()
        self._closed.set()
        while connections := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(connections)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*_CONNECTION_ERRORS):
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(self.build_answer(head))
            if writer.can_write_eof():
                writer.write_eof()
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                await writer.drain()
                await self._discard_body(reader)
        writer.close()

    async def _discard_body(self, reader: asyncio.StreamReader) -> None:
        left = MAX_BODY_BYTES
        while left > 0 and (data := await reader.read(1 << 16)):
            left -= len(data)

    def build_answer(self, head: bytes) -> bytes:
        """The whole answer to a request with this head."""
        words = head.split(b"\r\n", 1)[0].split(b" ")
        path = words[1].partition(b"?")[0].decode("latin-1") if len(words) > 1 else ""
        path = path.removeprefix(listen_sockets.normalize_root_path(self._options.root_path))
        if path == "/live" or (path == "/startup" and self._started):
            return _encode_answer("200 OK", b"")
        seconds = round(time.monotonic() - self._opened_at, 1)
        message = f"the server starts: {STARTUP_PHASES[self.phase]}, after {seconds:.1f} s"
        found = encode_problem(Unhealthy("starting", message), phase=self.phase, seconds=seconds)
        answer = _encode_answer("503 Service Unavailable", found, f"Retry-After: {RETRY_AFTER_S}")
        return answer.removesuffix(found) if words[0] == b"HEAD" else answer


def _encode_answer(status: str, content: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close", *headers]
    if content:
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + content
