"""What stands before all routes: keys, and request ids in answers. Plain ASGI, no copies."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server import page
from quire.server.errors import MOST_CHARS, error_response
from quire.server.keys import KeyRing
from quire.server.services import HOLDER, MAX_ID_CHARS, REQUEST_ID, TENANT

OPEN = frozenset({"/health", "/live", "/ready", "/startup", "/ping"}) | page.OPEN
"""Probes bring no key, and a person must see the page to enter one."""
UNKNOWN = "Unauthorized: send one of this server's keys as Authorization: Bearer KEY"
FORBIDDEN = "this key may not ask for"


class Guard:
    """Lets a request pass if it brings a key that may ask for its path, and notes whose it is."""

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None if scope["type"] == "lifespan" else self._refused(scope)
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await refused(scope, receive, send)

    def _refused(self, scope: Scope) -> Response | None:
        """The answer to one that may not pass."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and (scope["method"] == "OPTIONS" or path in OPEN):
            return None
        keys = _keys(scope["headers"])
        found = [holder for key in keys or () if (holder := self._ring.find(key)) is not None]
        if not found:
            return _answer(scope, 401, UNKNOWN, {"WWW-Authenticate": "Bearer"})
        holder = found[0]
        scope[TENANT], scope[HOLDER] = holder.tenant, holder
        if not holder.may(path):
            return _answer(scope, 403, f"{FORBIDDEN} {path[:MOST_CHARS]}")
        return None


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


def _answer(
    scope: Scope, status: int, message: str, headers: dict[str, str] | None = None
) -> Response:
    return error_response(HTTPException(status, message, headers), scope)


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
