"""Node exchange: gathers a value of each node on all nodes, through a socket of the head (node 0).

For checks before anything else runs. With a cluster secret the connection is encrypted and both
sides are authenticated; without one it must be on loopback.
"""

from __future__ import annotations

import time

import msgspec
import zmq

from quire.distributed.cluster_secret import ClusterSecret, is_loopback
from quire.distributed.node_address import Endpoint, endpoint_of, listen
from quire.errors import ConfigError


class _Value(msgspec.Struct, frozen=True):
    node: int
    round: int
    data: bytes


_VALUE = msgspec.msgpack.Decoder(_Value)
_VALUES = msgspec.msgpack.Decoder(list[bytes])


class NodeExchange:
    """This node's end. The caller must close() it."""

    def __init__(
        self, address: str, port: int, node: int, count: int, secret: ClusterSecret | None
    ) -> None:
        """Listen (node 0), or connect to the head's address. Raises ConfigError."""
        if secret is None and not is_loopback(address):
            raise ConfigError(
                f"master_addr={address} is not loopback: all nodes need a common secret, from "
                "--cluster-secret-file FILE or QUIRE_CLUSTER_SECRET; make one with "
                "`openssl rand -hex 32`"
            )
        self._node, self._count, self._round = node, count, 0
        self.head = address
        where = Endpoint(address, port)
        listener = None
        if node == 0:
            listener = listen(address, port, what="--master-addr and --master-port")
            where = endpoint_of(listener)
        self._where = str(where)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 1000)
        self._zap = None
        if node == 0 and secret is not None:
            self._zap = secret.accept_clients(self._context)
        self._socket = self._context.socket(zmq.DEALER if node else zmq.ROUTER)
        self._values: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # round, node -> peer, data
        self._peers: set[bytes] = set()
        self._socket.setsockopt(zmq.IPV6, int(":" in where.address))
        if listener is None:
            if secret is not None:
                secret.secure_client(self._socket)
            self._socket.connect(where.url)
            return
        if secret is not None:
            secret.secure_server(self._socket)
        self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(where.url)

    def gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """Return the values of all nodes, in order. Raises ConfigError."""
        self._round += 1
        deadline = time.monotonic() + timeout_s
        if self._node:
            return self._send(data, deadline)
        try:
            self._collect(deadline)
        except ConfigError:
            self._answer([])  # to those that wait: it failed
            raise
        values = [data, *(self._values[self._round, node][1] for node in range(1, self._count))]
        self._answer(values)
        return values

    def _send(self, data: bytes, deadline: float) -> list[bytes]:
        self._socket.send(msgspec.msgpack.encode(_Value(self._node, self._round, data)))
        if not self._wait(deadline):
            raise ConfigError(
                f"node 0 has not answered at {self._where}: is the same command running there with "
                "node_rank 0, with the same secret, and is the port open?"
            )
        values = _VALUES.decode(self._socket.recv())
        if not values:
            raise ConfigError(f"the check has failed on node 0, {self._where}, which says why")
        return values

    def _collect(self, deadline: float) -> None:
        while missing := [
            node for node in range(1, self._count) if (self._round, node) not in self._values
        ]:
            if not self._wait(deadline):
                raise ConfigError(
                    f"nodes {', '.join(map(str, missing))} of {self._count} have not connected to "
                    f"{self._where}: is the same command running there with its node_rank, with "
                    "the same secret, and is the port open?"
                )
            peer, message = self._socket.recv_multipart()
            value = _VALUE.decode(message)
            self._peers.add(peer)
            known, _ = self._values.setdefault((value.round, value.node), (peer, value.data))
            if known != peer or not 0 < value.node < self._count:
                raise ConfigError(
                    f"two nodes have node_rank {value.node}, or it is not less than {self._count}"
                )

    def _answer(self, values: list[bytes]) -> None:
        for peer in self._peers:
            self._socket.send_multipart([peer, msgspec.msgpack.encode(values)])

    def _wait(self, deadline: float) -> bool:
        return bool(self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))))

    def close(self) -> None:
        self._socket.close()
        if self._zap is not None:
            self._zap.stop()
        self._context.term()
