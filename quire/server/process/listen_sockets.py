"""Binds the listening sockets before anything slow, so that a used address is reported at once.

They listen when the server is ready: until then clients are refused. One API process has one
socket. Several on a TCP port have one each (SO_REUSEPORT): the kernel then distributes connections
evenly, whereas processes that share one socket leave them to the first that wakes, which takes all
that arrived at once. A unix socket has no such option, so they share it.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from pathlib import Path

from quire.errors import ConfigError
from quire.server.options import ServerOptions

log = logging.getLogger(__name__)

ANY_ADDRESS = ("0.0.0.0", "::", "")


def bind_sockets(options: ServerOptions) -> list[socket.socket]:
    """One bound socket for each API process. Raises ConfigError."""
    where = options.uds or f"{options.host}:{options.port}"
    try:
        if options.uds is not None:
            made = _bind_unix(Path(options.uds))
            return [made] + [made.dup() for _ in range(options.api_server_count - 1)]
        return _bind_tcp(options)
    except (OSError, OverflowError) as error:
        hint = "choose another with --host and --port" if options.uds is None else "choose another"
        raise ConfigError(f"cannot listen on {where}: {error}; {hint}") from None


def _warn_if_open(options: ServerOptions, address: str) -> None:
    """Log a warning if the server can be used from other machines without a key."""
    has_key = options.api_key or options.api_key_file or options.ssl_cert_reqs == ssl.CERT_REQUIRED
    if not has_key and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        log.warning(
            "%s is open to other machines, and no key is needed: set QUIRE_API_KEY or "
            "--api-key-file, or limit access by other means", address,
        )  # fmt: skip


def _bind_tcp(options: ServerOptions) -> list[socket.socket]:
    family, _, _, _, address = socket.getaddrinfo(
        options.host or None, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    _warn_if_open(options, str(address[0]))
    first = _bind(family, address)
    if options.api_server_count == 1:
        return [first]
    address = first.getsockname()  # with the port that was chosen, if 0 was given
    first.close()  # no other process has it; all of ours would share it with others too
    return [_bind(family, address, shared=True) for _ in range(options.api_server_count)]


def _bind(family: int, address: object, *, shared: bool = False) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)  # type: ignore[arg-type]
    except BaseException:
        made.close()
        raise
    return made


def _bind_unix(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError("another server listens there")
        path.unlink()  # of a server that ended
    made.bind(str(path))
    path.chmod(0o600)
    return made


def listener_url(options: ServerOptions, listener: socket.socket) -> str:
    """The address as a URL without a path. For a unix socket any host does."""
    scheme = "https" if options.ssl_certfile else "http"
    if options.uds is not None:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host in ANY_ADDRESS else host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_tls(options: ServerOptions) -> None:
    """Raise ConfigError if the TLS files are of no use, before anything slow is begun."""
    if options.ssl_certfile is None:
        others = ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers", "enable_ssl_refresh")
        given = [name for name in others if getattr(options, name)]
        if given or options.ssl_cert_reqs:
            name = (given or ["ssl_cert_reqs"])[0]
            raise ConfigError(f"{name} needs ssl_certfile: without it the server speaks HTTP")
        return
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        try:
            if (path := getattr(options, name)) is not None:
                Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_tls(context, options)
        if options.ssl_ciphers:
            context.set_ciphers(options.ssl_ciphers)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"cannot use the TLS files: {error}") from None
    if options.ssl_cert_reqs and options.ssl_ca_certs is None:
        raise ConfigError("ssl_cert_reqs needs ssl_ca_certs: which certificates count?")


def load_tls(context: ssl.SSLContext, options: ServerOptions) -> None:
    """Put what the files have now into a context; new connections use it. Raises OSError."""
    assert options.ssl_certfile is not None
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=_refuse_password)
    if options.ssl_ca_certs is not None:
        context.load_verify_locations(options.ssl_ca_certs)


def _refuse_password() -> str:
    raise ValueError("the key file is encrypted; give one that is not, readable by the server only")


def normalize_root_path(given: str) -> str:
    """--root-path as a prefix of paths: "/llm" for "llm" and "/llm/"; "" for "/"."""
    bare = given.strip("/")
    return f"/{bare}" if bare else ""
