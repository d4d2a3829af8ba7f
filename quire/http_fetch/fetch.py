"""HTTP client for addresses that clients give: fetches from them and posts to them.

    parse ── resolve ── check every address ── connect to one that was checked ── read, bounded
      ▲                                                          │
      └──────────────── a redirect: all of it again ◀────────────┘

A name is resolved once, and the connection goes to the address that was checked: a DNS answer that
changes in between has no effect. A host with public and private addresses is refused. It uses no
proxy or credentials of the environment. Compressed content is not requested, so
nothing unpacks to more than was counted. One Fetcher has one policy and no state.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

import anyio
import httpcore

from quire.errors import RequestError
from quire.http_fetch.url import (
    HttpUrl,
    IPAddress,
    host_matches,
    is_public,
    parse_url,
    resolve_redirect,
)


class FetchFailed(RequestError):
    """The address was allowed and gave no content. may_retry: it may do so later."""

    def __init__(self, message: str, *, param: str | None, may_retry: bool) -> None:
        super().__init__(message, param=param)
        self.may_retry = may_retry


ResolveHost = Callable[[str, int], Awaitable[list[str]]]

CHUNK = 1 << 16
MAX_ADDRESSES = 32
REDIRECT_STATUSES = frozenset((301, 302, 303, 307, 308))
CREDENTIAL_HEADERS = frozenset(("authorization", "cookie", "proxy-authorization"))


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Limits on hosts, sizes, times and media types."""

    hosts: tuple[str, ...] | None = None
    """Allowed hosts; `*.example.com` is any host below that. None: any."""
    private_hosts: tuple[str, ...] = ()
    """Hosts that may have addresses that are not public."""
    max_bytes: int = 64 << 20
    total_timeout_s: float = 30.0
    idle_timeout_s: float = 10.0
    """Limit of the wait for a byte, and for a connection."""
    max_redirects: int = 5
    media_types: tuple[str, ...] = ()
    """Allowed beginnings of the media type: image/, text/plain. Empty: any."""


@dataclass(frozen=True, slots=True)
class FetchedContent:
    """The whole content of a response."""

    data: bytes
    media_type: str
    """The media type in lower case; empty if the response has none."""


async def resolve_host(host: str, port: int) -> list[str]:
    """Return numeric addresses of a host, as this machine resolves them. Raises OSError."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(one[4][0]) for one in found]


class HttpFetcher:
    """Fetches under one policy."""

    def __init__(
        self,
        policy: FetchPolicy,
        *,
        resolve: ResolveHost = resolve_host,
        network: httpcore.AsyncNetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """network: connects to numeric addresses. tls: the trusted certificates."""
        self._policy = policy
        self._network = _CheckedBackend(policy, resolve, network or httpcore.AnyIOBackend())
        self._tls = tls

    async def get(
        self, url: str, *, headers: Mapping[str, str] | None = None, param: str | None = None
    ) -> FetchedContent:
        """Fetch the content. headers: sent to this host; credentials not to others.

        Raises RequestError.
        """
        async with self._get_response(url, dict(headers or {}), param) as answer:
            data = b"".join([chunk async for chunk in self._read_limited(answer, param)])
            return FetchedContent(data, answer.media_type)

    async def download(self, url: str, file: BinaryIO, *, param: str | None = None) -> int:
        """Write the content to a file and return its size. Raises RequestError."""
        size = 0
        async with self._get_response(url, {}, param) as answer:
            async for chunk in self._read_limited(answer, param):
                size += file.write(chunk)
        return size

    async def put(self, url: str, file: BinaryIO, size: int, *, param: str | None = None) -> None:
        """Upload a file. Redirects are not followed. Raises RequestError."""
        headers = {"Content-Length": str(size)}
        with _translate_errors(url, param):
            with anyio.fail_after(self._policy.total_timeout_s):
                address = self._parse_allowed(url, param)
                async with self._send_request(
                    "PUT", address, headers, _file_chunks(file)
                ) as answer:
                    if not 200 <= answer.status < 300:
                        raise RequestError(f"{address} answered {answer.status}", param=param)

    # -- internal ---------------------------------------------------------------------------------

    def _parse_allowed(self, url: str, param: str | None) -> HttpUrl:
        return self._check_host(parse_url(url, param), param)

    def _check_host(self, address: HttpUrl, param: str | None) -> HttpUrl:
        hosts = self._policy.hosts
        if hosts is not None and not host_matches(address.host, hosts):
            message = f"{address}: addresses of this host are not fetched here"
            raise RequestError(message, param=param)
        return address

    @asynccontextmanager
    async def _get_response(
        self, url: str, headers: dict[str, str], param: str | None
    ) -> AsyncIterator[_HttpResponse]:
        """Return a successful response, after all redirects."""
        policy = self._policy
        with _translate_errors(url, param), anyio.fail_after(policy.total_timeout_s):
            address = self._parse_allowed(url, param)
            for _ in range(policy.max_redirects + 1):
                async with self._send_request("GET", address, headers) as answer:
                    if answer.status not in REDIRECT_STATUSES:
                        _check_headers(answer, policy, param)
                        yield answer
                        return
                    there = resolve_redirect(address, answer.header("location"), param)
                if address.scheme == "https" and there.scheme != "https":
                    raise RequestError(f"{address} redirects from https to http", param=param)
                if there.origin != address.origin:
                    headers = {
                        k: v for k, v in headers.items() if k.lower() not in CREDENTIAL_HEADERS
                    }
                if policy.hosts is not None and not host_matches(there.host, policy.hosts):
                    message = f"{address} redirects to a host whose addresses are not fetched here"
                    raise RequestError(message, param=param)
                address = there
            raise RequestError(
                f"{url!r:.100} redirects more than {policy.max_redirects} times", param=param
            )

    @asynccontextmanager
    async def _send_request(
        self,
        method: str,
        address: HttpUrl,
        headers: Mapping[str, str],
        content: AsyncIterator[bytes] | None = None,
    ) -> AsyncIterator[_HttpResponse]:
        sent = {**headers, "Host": address.authority, "Accept-Encoding": "identity"}
        sent.setdefault("User-Agent", "quire")
        tls = self._tls if address.scheme == "http" or self._tls else ssl.create_default_context()
        where = httpcore.URL(
            scheme=address.scheme.encode(),
            host=address.host.encode(),
            port=address.port,
            target=address.target.encode(),
        )
        idle = self._policy.idle_timeout_s
        limits = dict.fromkeys(("connect", "read", "write", "pool"), idle)
        pool = httpcore.AsyncConnectionPool(
            network_backend=self._network, ssl_context=tls, max_connections=1, retries=0
        )
        async with (
            pool,
            pool.stream(
                method,
                where,
                headers=list(sent.items()),
                content=content,
                extensions={"timeout": limits},
            ) as response,
        ):
            yield _HttpResponse(address, response)

    async def _read_limited(self, answer: _HttpResponse, param: str | None) -> AsyncIterator[bytes]:
        size, most = 0, self._policy.max_bytes
        async for chunk in answer.response.aiter_stream():
            size += len(chunk)
            if size > most:
                raise _too_large(answer.url, most, param)
            yield chunk


@dataclass(frozen=True, slots=True)
class _HttpResponse:
    url: HttpUrl
    response: httpcore.Response

    @property
    def status(self) -> int:
        return int(self.response.status)

    @property
    def media_type(self) -> str:
        return self.header("content-type").partition(";")[0].strip().lower()

    def header(self, name: str) -> str:
        """Return the first header of this name, or ""."""
        for key, value in self.response.headers:
            if key.lower() == name.encode():
                return value.decode("latin-1")
        return ""


def _check_headers(answer: _HttpResponse, policy: FetchPolicy, param: str | None) -> None:
    """Check status and headers of the response. Raises RequestError."""
    address = answer.url
    if answer.status != 200:
        message = f"{address} answered {answer.status}"
        raise FetchFailed(message, param=param, may_retry=answer.status >= 500)
    if answer.header("content-encoding").lower() not in ("", "identity"):
        raise RequestError(f"{address} answered with compressed content", param=param)
    if policy.media_types and not answer.media_type.startswith(policy.media_types):
        wanted = " or ".join(policy.media_types)
        raise RequestError(f"{address} is {answer.media_type!r:.60}, not {wanted}", param=param)
    length = answer.header("content-length")
    if length.isdigit() and int(length[:20]) > policy.max_bytes:
        raise _too_large(address, policy.max_bytes, param)


def _too_large(address: HttpUrl, most: int, param: str | None) -> RequestError:
    return RequestError(f"{address} has more than {most} bytes", param=param)


async def _file_chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := file.read(CHUNK):
        yield piece


class _translate_errors:
    """Turns network errors into RequestErrors with own messages: originals may show internals."""

    def __init__(self, url: str, param: str | None) -> None:
        self._url, self._param = url.partition("?")[0], param

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RequestError) and error.param is None:
            error.param = self._param
        why = next((why for kind, why in _ERROR_MESSAGES if isinstance(error, kind)), None)
        if why is not None:
            message = f"{self._url!r:.200}: {why}"
            raise FetchFailed(message, param=self._param, may_retry=True) from None


_ERROR_MESSAGES: tuple[tuple[type[BaseException], str], ...] = (
    (httpcore.TimeoutException, "it does not answer in time"),
    (TimeoutError, "fetching it takes too long"),
    (httpcore.ConnectError, "its host cannot be reached"),
    (httpcore.NetworkError, "the connection was closed early"),
    (httpcore.ProtocolError, "it does not answer in HTTP"),
    (httpcore.UnsupportedProtocol, "it does not answer in HTTP"),
)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, and to no others."""

    def __init__(
        self, policy: FetchPolicy, resolve: ResolveHost, inner: httpcore.AsyncNetworkBackend
    ) -> None:
        self._policy = policy
        self._resolve = resolve
        self._inner = inner

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers. Raises RequestError if none is allowed."""
        fault: Exception = httpcore.ConnectError()
        for address in await self._resolve_checked(host, port, timeout):
            try:
                return await self._inner.connect_tcp(str(address), port, timeout)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                fault = error
        raise fault

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Refuse."""
        raise httpcore.ConnectError()

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)

    async def _resolve_checked(
        self, host: str, port: int, timeout: float | None
    ) -> list[IPAddress]:
        """Return checked addresses. The error does not reveal whether a name has forbidden ones."""
        try:
            with anyio.fail_after(timeout):
                resolved = await self._resolve(host, port)
            found = [ipaddress.ip_address(one) for one in dict.fromkeys(resolved)][:MAX_ADDRESSES]
        except (OSError, ValueError):
            found = []
        own = host_matches(host, self._policy.private_hosts)
        if not found or not (own or all(map(is_public, found))):
            raise RequestError(f"{host!r:.100} has no address that is public")
        return found
