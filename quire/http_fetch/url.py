"""URL parser for addresses from clients: a text is parsed once, and all code uses the result.

Two parsers that disagree about the host let one address be checked and another one fetched. So
only what all parsers agree on is accepted: ASCII, no user or password, no backslash, no numbers in
place of addresses. The network address of a name is checked when it is resolved (`is_public`), as
a number, in whatever notation it was written.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, urljoin

from quire.errors import RequestError

MAX_URL_CHARS = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_UNQUOTED = "/?:@!$&'()*+,;=-._~%[]"  # characters that are not quoted in path and query


class HttpUrl(NamedTuple):
    """An HTTP address. host: lower case, without brackets and the final dot."""

    scheme: str
    host: str
    port: int
    target: str
    """Path and query, as sent."""

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        """Without the query, which may hold a signature."""
        path, mark, _ = self.target.partition("?")
        return f"{self.scheme}://{self.authority}{path}{mark and '?...'}"


def parse_url(text: str, param: str | None = None) -> HttpUrl:
    """Parse an address from a request. Raises RequestError."""
    quoted = f"{text!r:.100}"
    if len(text) > MAX_URL_CHARS:
        raise RequestError(f"an address has at most {MAX_URL_CHARS} characters", param=param)
    if any(char <= " " or char in "\\\x7f" for char in text):
        raise RequestError(f"the address {quoted} holds a space, a control or a \\", param=param)
    form = _URL.fullmatch(text)
    if form is None:
        raise RequestError(f"the address {quoted} must begin with http:// or https://", param=param)
    scheme, authority, rest = form[1].lower(), form[2], form[3]
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        why = "user names and passwords are not allowed, and host names are ASCII (xn--)"
        raise RequestError(f"the address {quoted} has no host that can be used: {why}", param=param)
    port = DEFAULT_PORTS[scheme] if parts[2] is None else int(parts[2])
    host = _normalize_host(parts[1])
    if host is None or not 0 < port < 65536:
        raise RequestError(
            f"the address {quoted} has no host and port that can be used", param=param
        )
    target = quote(rest if rest.startswith("/") else f"/{rest}", safe=_UNQUOTED)
    return HttpUrl(scheme, host, port, target)


def resolve_redirect(address: HttpUrl, location: str, param: str | None = None) -> HttpUrl:
    """Return the target of a redirect. Raises RequestError."""
    if any(char <= " " or char in "\\\x7f" for char in location):  # urljoin would drop some
        raise RequestError(f"{address} redirects to something that is not an address", param=param)
    here = f"{address.scheme}://{address.authority}{address.target}"
    try:
        there = urljoin(here, location)
    except ValueError:
        raise RequestError(
            f"{address} redirects to something that is not an address", param=param
        ) from None
    return parse_url(there, param)


def _normalize_host(text: str) -> str | None:
    """Normalize a host; None if it is invalid, or only some parsers accept it."""
    try:
        if text.startswith("["):
            return str(ipaddress.IPv6Address(text[1:-1]))
        host = text.lower().removesuffix(".")
        labels = host.split(".")
        if _NUMERIC_LABEL.fullmatch(
            labels[-1]
        ):  # not a name: some parsers read 127.1 as an address
            return str(ipaddress.IPv4Address(host))
    except ValueError:
        return None
    return host if len(host) < 254 and all(map(_LABEL.fullmatch, labels)) else None


def host_matches(host: str, names: Collection[str]) -> bool:
    """Whether the host is one of them, or below one that begins with `*.`"""
    return any(
        host.endswith(name[1:].lower()) if name.startswith("*.") else host == name.lower()
        for name in names
    )


# -- network addresses ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Networks:
    v4: tuple[ipaddress.IPv4Network, ...]
    v6: tuple[ipaddress.IPv6Network, ...]


def _networks(v4: str, v6: str) -> _Networks:
    return _Networks(
        tuple(map(ipaddress.IPv4Network, v4.split())), tuple(map(ipaddress.IPv6Network, v6.split()))
    )


# Python's is_global differs between its versions, so this lists what is not public. Of v4: this
# host, private, shared by carriers (also where clouds keep metadata: 100.100.100.200), loopback,
# link-local (169.254.169.254), assigned for protocols, documentation, relays of 6to4, benchmarks,
# multicast, reserved; and the one public address at which a cloud answers machines of its own.
# Of v6: of what is routed at all (2000::/3), protocols with Teredo, documentation, 6to4.
_NON_PUBLIC = _networks(
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 "
    "192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 "
    "224.0.0.0/4 240.0.0.0/4 168.63.129.16/32",
    "2001::/23 2001:db8::/32 2002::/16 3fff::/20",
)
_GLOBAL_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_V4_EMBEDDED = (ipaddress.IPv6Network("::ffff:0:0/96"), ipaddress.IPv6Network("64:ff9b::/96"))
"""v6 addresses that hold a v4 address in their last 32 bits: mapped, NAT64."""


def is_public(address: IPAddress) -> bool:
    """Whether the address is reachable from the whole internet."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in net for net in _NON_PUBLIC.v4)
    if any(address in net for net in _V4_EMBEDDED):
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _GLOBAL_UNICAST_V6 and not any(address in net for net in _NON_PUBLIC.v6)
