"""Head set-up: gathers the machines of a model whose head this one is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from quire import env
from quire.config.engine_config import EngineConfig
from quire.config.options import Options
from quire.distributed.cluster_secret import ClusterSecret, require_cluster_secret
from quire.distributed.collectives import open_store
from quire.distributed.node_address import interface_of, listen_for_nodes
from quire.engine.startup.node_process import comparable_options
from quire.executors.node_head import NodeHead


class JoinPort(NamedTuple):
    """Where other machines join."""

    fd: int  # of listen_for_nodes(), as inherited
    on_wait: Callable[[], None]  # called from time to time while the engine waits for them


class JoiningMachines:
    """Those that run `quire serve --headless`; one without --nnodes."""

    def __init__(self, options: Options, port: JoinPort | None) -> None:
        self.options = options
        self._port = port

    def gather(self, config: EngineConfig) -> NodeHead | None:
        nodes, section = config.parallel.nodes, self.options.parallel
        if nodes == 1:
            return None
        secret = require_cluster_secret(section.cluster_secret_file, env.read(), f"nnodes={nodes}")
        listener = (
            listen_for_nodes(self.options)
            if self._port is None
            else socket.socket(fileno=os.dup(self._port.fd))
        )
        assert listener is not None
        check = (lambda: None) if self._port is None else self._port.on_wait
        return gather_nodes(config, secret, listener, comparable_options(self.options), check=check)

    def close(self) -> None:
        """There is nothing: a NodeHead closes its connections."""


def gather_nodes(
    config: EngineConfig,
    secret: ClusterSecret,
    listener: socket.socket,
    options: dict[str, Any],
    begin: Callable[[NodeHead], None] = lambda head: None,
    check: Callable[[], None] = lambda: None,
) -> NodeHead:
    """Wait for the other machines, which join at a listener. Raises ConfigError.

    options: that they must share. begin: called when they can join. check: called while they are
    awaited; what it raises ends the wait.
    """
    parallel = config.parallel
    sizes = [parallel.ranks_per_node] * parallel.nodes
    head = NodeHead(secret, listener, sizes, config.device.kind, open_store)
    try:
        env.set_collective_variables(interface_of(head.endpoint.address), watched=True)
        begin(head)
        head.gather(options, check)
    except BaseException as error:
        head.end_ranks(f"the start failed: {error}")
        head.close()
        raise
    return head
