"""What ordinary clients never send: bytes on a socket."""

import contextlib
import json
import socket
import time

from tests.abuse.harness import KEY

COMPLETE = "/v1/completions"
SMALL = b'{"model":"embedded","prompt":"a","max_tokens":1}'


def address(victim):
    host, port = victim.url.removeprefix("http://").split(":")
    return host, int(port)


def head(method="POST", path=COMPLETE, *, key=KEY, length=None, lines=(), host="localhost"):
    """The head of a request; key None: without one."""
    made = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    if key is not None:
        made.append(f"Authorization: Bearer {key}")
    if method == "POST":
        made.append("Content-Type: application/json")
    if length is not None:
        made.append(f"Content-Length: {length}")
    return "\r\n".join([*made, *lines, "", ""]).encode("latin-1")


def post(body=SMALL, path=COMPLETE, *, lines=(), **more):
    return head("POST", path, length=len(body), lines=lines, **more) + body


def talk(victim, *pieces, within_s=20.0):
    """All that comes back until the server closes, or until it has answered and says no more."""
    got = b""
    with socket.create_connection(address(victim), timeout=within_s) as made:
        with contextlib.suppress(ConnectionError):  # it may hang up while we send
            for piece in pieces:
                made.sendall(piece)
        deadline = time.monotonic() + within_s
        with contextlib.suppress(ConnectionError, TimeoutError):
            while time.monotonic() < deadline and not _is_whole(got):
                part = made.recv(65536)
                if not part:
                    break
                got += part
    return got


def _is_whole(got):
    """One answer with a length is there."""
    top, found, body = got.partition(b"\r\n\r\n")
    if not found:
        return False
    for line in top.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return False


def status(got):
    """0: it hung up without a word."""
    return int(got.split(b" ", 2)[1]) if got.startswith(b"HTTP/1.1 ") else 0


def body_of(got):
    return json.loads(got.partition(b"\r\n\r\n")[2])
