"""CSRF guard: refuses requests that a browser makes for a page of another origin.

A browser reaches what its user reaches, above all a server on loopback. Two ways are open to a
foreign page, and CORS closes neither: a simple POST is sent at once and only its answer is kept
from the page; and a name that its owner points at 127.0.0.1 makes the page one of the server's own
(DNS rebinding). Browsers declare the origin: `Origin`, `Sec-Fetch-Site`. A client that sends
neither is no browser, and may use any host name of a proxy. Pages of --allowed-origins are allowed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import error_response

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CROSS_SITE_VALUES = frozenset({"cross-site", "same-site"})
"""Sec-Fetch-Site of a request that another origin's page makes."""
ANY_ORIGIN = "*"

FOREIGN_HOST_MESSAGE = "a page may ask this server under its own name only, not under {}; {}"
FOREIGN_ORIGIN_MESSAGE = "a page of {} may not do this; {}"
ALLOW_ORIGINS_HINT = "start the server with --allowed-origins to let a page in"


class CsrfGuard:
    """Passes a request on unless its headers show a page of another origin.

    is_local: the server listens where only this machine reaches it, so names for it are known.
    """

    def __init__(self, app: ASGIApp, *, allowed: Collection[str], is_local: bool) -> None:
        self._app = app
        self._allowed = frozenset(one.rstrip("/").lower() for one in allowed)
        self._allowed_hosts = frozenset(_host_name(urlsplit(one).netloc) for one in self._allowed)
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._refusal_reason(scope) if scope["type"] == "http" else None
        if why is None:
            await self._app(scope, receive, send)
        else:
            await error_response(HTTPException(403, why), scope)(scope, receive, send)

    def _refusal_reason(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if (origin is None and site is None) or ANY_ORIGIN in self._allowed:
            return None
        host = headers.get("host", "")
        if self._is_local and not self._is_own_host(host):
            return FOREIGN_HOST_MESSAGE.format(ascii(host[:80]), ALLOW_ORIGINS_HINT)
        if scope["method"] in SAFE_METHODS or (origin or "").lower() in self._allowed:
            return None
        if site in CROSS_SITE_VALUES or (site is None and not _is_same_origin(origin or "", host)):
            return FOREIGN_ORIGIN_MESSAGE.format(
                ascii((origin or "another site")[:80]), ALLOW_ORIGINS_HINT
            )
        return None

    def _is_own_host(self, host: str) -> bool:
        name = _host_name(host)
        return name in self._allowed_hosts or is_loopback(name)


def is_loopback(name: str) -> bool:
    """Whether it is this machine alone."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """The host without its port: an attacker chooses the name, and the port must be ours."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether origin and host agree, for a browser that sends no Sec-Fetch-Site."""
    return origin.partition("://")[2].lower() == host.lower()
