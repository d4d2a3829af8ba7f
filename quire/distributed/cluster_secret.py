"""Cluster secret: what the machines of one deployment share, and the keys of their connections.

Both CURVE key pairs of a ZeroMQ connection are derived from the secret. A server accepts only the
client key of the same secret, so both sides are authenticated, and all messages are encrypted.
Without a secret nothing may listen on an address that is not loopback.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from quire import env
from quire.errors import ConfigError

MIN_BYTES = 16
"""A shorter secret is refused: recorded handshakes of a guessed one can be checked offline."""
_DOMAIN = "quire-cluster"
_SCRYPT: dict[str, Any] = {"salt": b"quire cluster keys, version 1", "n": 1 << 14, "r": 8, "p": 1}


class ClusterSecret:
    """The secret of a cluster. Its text is in no representation of it."""

    def __init__(self, secret: bytes) -> None:
        """Raises ConfigError if it has fewer than MIN_BYTES."""
        if len(secret) < MIN_BYTES:
            raise ConfigError(
                f"the cluster secret has {len(secret)} bytes; it needs at least {MIN_BYTES}: make "
                "one with `openssl rand -hex 32`"
            )
        self.secret = secret
        keys = hashlib.scrypt(secret, dklen=64, **_SCRYPT)
        self._server, self._client = z85.encode(keys[:32]), z85.encode(keys[32:])

    def __repr__(self) -> str:
        return "ClusterSecret(...)"

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE server, before it is bound. See accept_clients()."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._server)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE client, before it is connected."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._client)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self._client))
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(self._server))

    def accept_clients(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Have the servers of a context accept the clients of this secret, and no others.

        Call it before they are bound: without it any key is accepted. The caller must stop() what
        is returned before the context ends.
        """
        log = logging.getLogger("quire.zap")
        log.setLevel(logging.ERROR)  # what it logs below that has keys
        thread = ThreadAuthenticator(context, log=log)
        thread.start()
        thread.configure_curve_callback(_DOMAIN, _AcceptedKey(zmq.curve_public(self._client)))
        return thread


class _AcceptedKey:
    """The credentials provider of a ZAP authenticator. Keys are in Z85."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


def read_cluster_secret(file: str | None, environment: env.Env) -> ClusterSecret | None:
    """Read the secret from a file, or from QUIRE_CLUSTER_SECRET. None: there is none.

    White space around it does not count. Raises ConfigError.
    """
    if file is not None:
        try:
            return ClusterSecret(Path(file).read_bytes().strip())
        except OSError as error:
            raise ConfigError(f"cluster_secret_file: {error}") from None
    given = environment.cluster_secret
    return None if given is None else ClusterSecret(given.strip().encode())


def require_cluster_secret(file: str | None, environment: env.Env, what: str) -> ClusterSecret:
    """As read_cluster_secret(). what: the options that need one. Raises ConfigError."""
    found = read_cluster_secret(file, environment)
    if found is None:
        raise ConfigError(
            f"{what} needs a secret that all machines share: --cluster-secret-file FILE or "
            "QUIRE_CLUSTER_SECRET; make one with `openssl rand -hex 32`"
        )
    return found


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine alone. A name counts only if it is `localhost`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
