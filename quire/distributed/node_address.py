"""Node address: the address of this machine for others, its interface, and tests of the network."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil

from quire import env
from quire.config.options import Options
from quire.distributed.cluster_secret import is_loopback, require_cluster_secret
from quire.errors import ConfigError

LISTEN_BACKLOG = 1024


class Endpoint(msgspec.Struct, frozen=True):
    """A TCP port of a node."""

    address: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """For ZeroMQ."""
        return f"tcp://{self}"


def own_address(head: str, given: str | None) -> str:
    """Return the address of this machine for the others. given: by the user; it has priority.

    Else that of the interface which routes to the head. Raises ConfigError.
    """
    if given is not None:
        return given
    try:
        family, _, _, _, where = socket.getaddrinfo(head, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"no route to the head {head!r}: {error}; check its address") from None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return name
    return None


def listen(address: str, port: int, *, what: str) -> socket.socket:
    """Return a socket that listens at an address of this machine. Raises ConfigError.

    what: the options that set them, for the error. port: 0 for any.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(LISTEN_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {address}:{port} ({what}): {error.strerror or error}; it must be an "
            "address of this machine, and a free port"
        ) from None
    return listener


def listen_for_nodes(options: Options) -> socket.socket | None:
    """Return the socket where other machines join; None: there are none. Raises ConfigError."""
    section = options.parallel
    if section.nnodes == 1:
        return None
    require_cluster_secret(section.cluster_secret_file, env.read(), f"nnodes={section.nnodes}")
    what = "--master-addr and --master-port"
    return listen(section.master_addr, section.master_port, what=what)


def endpoint_of(listener: socket.socket) -> Endpoint:
    """Return where a socket listens."""
    address, port = listener.getsockname()[:2]
    return Endpoint(str(address), int(port))


def unreachable(endpoints: Sequence[Endpoint], limit_s: float) -> dict[int, str]:
    """Connect to each of these at once. Returns the indexes of those that failed, and why."""

    def failure(one: Endpoint) -> str | None:
        try:
            socket.create_connection((one.address, one.port), limit_s).close()
        except OSError as error:
            return error.strerror or str(error)
        return None

    if not endpoints:
        return {}
    with ThreadPoolExecutor(len(endpoints)) as pool:
        failures = list(pool.map(failure, endpoints))
    return {i: why for i, why in enumerate(failures) if why is not None}


def address_warnings(addresses: Sequence[str]) -> list[str]:
    """Return what is suspect about the addresses of the nodes, the head's first."""
    found = [
        f"node {i} advertises {one}, which only its own machine can reach: set QUIRE_HOST_IP there"
        for i, one in enumerate(addresses)
        if is_loopback(one) and not all(map(is_loopback, addresses))
    ]
    first: dict[str, int] = {}
    for i, one in enumerate(addresses):
        if first.setdefault(one, i) != i:
            found.append(
                f"nodes {first[one]} and {i} both advertise {one}: if they are two machines, set "
                "QUIRE_HOST_IP on each"
            )
    return found
