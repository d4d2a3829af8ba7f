"""Middleware in front of all routes: checks API keys, adds request ids to answers. Plain ASGI."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.app_state import (
    KEY_OWNER_SCOPE_KEY,
    MAX_ID_CHARS,
    REQUEST_ID_SCOPE_KEY,
    TENANT_SCOPE_KEY,
)
from quire.server.auth.api_keys import KeySet
from quire.server.errors import MAX_SHOWN_CHARS, error_response
from quire.server.routes import playground

PUBLIC_PATHS = (
    frozenset({"/health", "/live", "/ready", "/startup", "/ping"}) | playground.PUBLIC_PATHS
)
"""Probes bring no key, and a person must see the page to enter one."""
UNAUTHORIZED_MESSAGE = "Unauthorized: send one of this server's keys as Authorization: Bearer KEY"
FORBIDDEN_MESSAGE = "this key may not ask for"


class AuthMiddleware:
    """Passes a request on if its key allows its path, and records the owner of the key.

    public_paths: paths that need no key, besides PUBLIC_PATHS.
    """

    def __init__(self, app: ASGIApp, ring: KeySet, public_paths: Collection[str] = ()) -> None:
        self._app = app
        self._keys = ring
        self._public_paths = PUBLIC_PATHS.union(public_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await refused(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to one that may not pass."""
        path = get_route_path(scope)
        if scope["type"] == "http" and (scope["method"] == "OPTIONS" or path in self._public_paths):
            return None
        keys = _presented_keys(scope["headers"])
        found = [holder for key in keys or () if (holder := self._keys.lookup(key)) is not None]
        if not found:
            return _build_refusal(scope, 401, UNAUTHORIZED_MESSAGE, {"WWW-Authenticate": "Bearer"})
        holder = found[0]
        scope[TENANT_SCOPE_KEY], scope[KEY_OWNER_SCOPE_KEY] = holder.tenant, holder
        if not holder.may_access(path):
            return _build_refusal(scope, 403, f"{FORBIDDEN_MESSAGE} {path[:MAX_SHOWN_CHARS]}")
        return None


def _presented_keys(headers: Sequence[tuple[bytes, bytes]]) -> list[bytes] | None:
    """The client's keys: a bearer token, Anthropic's x-api-key, or both. None: one twice."""
    bearers = [value for name, value in headers if name == b"authorization"]
    keys = [value for name, value in headers if name == b"x-api-key"]
    if len(bearers) > 1 or len(keys) > 1:
        return None
    for value in bearers:
        scheme, _, key = value.partition(b" ")
        if scheme.lower() == b"bearer":
            keys.append(key)
    return keys


def _build_refusal(
    scope: Scope, status: int, message: str, headers: dict[str, str] | None = None
) -> Response:
    return error_response(HTTPException(status, message, headers), scope)


class RequestIdMiddleware:
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
        scope[REQUEST_ID_SCOPE_KEY] = wanted  # a new one is in the answer's own id too

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = wanted
            await send(message)

        await self._app(scope, receive, send_with_id)
