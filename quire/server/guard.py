"""What stands before all routes: keys, and request ids in answers. Plain ASGI, no copies."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server import page
from quire.server.errors import is_anthropic, message_error
from quire.server.services import MAX_ID_CHARS, REQUEST_ID

OPEN = frozenset({"/health", "/live", "/ready", "/startup", "/ping"}) | page.OPEN
"""Probes bring no key, and a person must see the page to enter one."""


class Guard:
    """Lets a request pass if it brings one of the keys. Compares digests in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._passes(scope):
            await self._app(scope, receive, send)
        else:
            await _refused(scope)(scope, receive, send)

    def _passes(self, scope: Scope) -> bool:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if scope["method"] == "OPTIONS" or path in OPEN:
                return True
        keys = _keys(scope["headers"])
        return keys is not None and any(self._knows(key) for key in keys)

    def _knows(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        found = False
        for known in self._digests:  # all of them, so that time tells nothing
            found |= hmac.compare_digest(digest, known)
        return found


def _keys(headers: Sequence[tuple[bytes, bytes]]) -> list[bytes] | None:
    """What the client shows: a bearer token, Anthropic's x-api-key, or both. None: one twice."""
    bearers = [value for name, value in headers if name == b"authorization"]
    keys = [value for name, value in headers if name == b"x-api-key"]
    if len(bearers) > 1 or len(keys) > 1:
        return None
    for value in bearers:
        scheme, _, key = value.partition(b" ")
        if scheme.lower() == b"bearer":
            keys.append(key)
    return keys


def _refused(scope: Scope) -> Response:
    message = "send one of this server's keys as Authorization: Bearer KEY"
    body = message_error(401, message) if is_anthropic(scope) else {"error": "Unauthorized"}
    headers = {"WWW-Authenticate": "Bearer"}
    return Response(msgspec.json.encode(body), 401, headers, "application/json")


class RequestIds:
    """Answers with the X-Request-Id that came, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        if not 0 < len(wanted) <= MAX_ID_CHARS:
            wanted = uuid.uuid4().hex
        scope[REQUEST_ID] = wanted  # a new one is in the answer's own id too

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = wanted
            await send(message)

        await self._app(scope, receive, send_with_id)
