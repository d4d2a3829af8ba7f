"""Health check of the image: GET /health at the address that the server in this container serves.

The address (port, TLS, unix socket) comes from the command line of the running `quire serve`, so
that a container with other flags is checked too. Exit status 0: healthy.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.cli.serve_flags import parse
from quire.server.options import ServerOptions

TIMEOUT_S = 4.0


def serve_flags_of_processes() -> Iterator[list[str]]:
    """Yield the flags of each `quire serve` that runs here."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text(errors="replace").split("\0")[:-1]
        except OSError:  # the process has ended
            continue
        for at, word in enumerate(words[:-1]):
            if Path(word).name == "quire" and words[at + 1] == "serve":
                yield words[at + 2 :]


class LocalConnection(http.client.HTTPConnection):
    """A connection to the server at its own address: TCP on loopback or a unix socket, or TLS."""

    def __init__(self, options: ServerOptions) -> None:
        host = "127.0.0.1" if options.host in ("", "0.0.0.0", "::") else options.host
        super().__init__(host, options.port, timeout=TIMEOUT_S)
        self._options = options
        self.is_accepted = False  # the server has taken the connection

    def connect(self) -> None:
        if self._options.uds is None:
            super().connect()
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(TIMEOUT_S)
            self.sock.connect(self._options.uds)
        self.is_accepted = True
        if self._options.ssl_certfile is not None:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is our own
            self.sock = context.wrap_socket(self.sock)


def is_healthy(flags: Sequence[str]) -> bool:
    """Whether the server with these flags answers /health with 200."""
    options = parse(flags)[1]
    connection = LocalConnection(options)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        # A server that wants certificates of its clients has refused ours: it lives.
        return options.ssl_cert_reqs == ssl.CERT_REQUIRED and connection.is_accepted
    finally:
        connection.close()


if __name__ == "__main__":
    found = next(serve_flags_of_processes(), None)
    sys.exit(0 if found is not None and is_healthy(found) else 1)
