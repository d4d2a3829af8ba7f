"""Head set-up: gathers the machines of a model whose head this one is."""

from __future__ import annotations

import os
import socket

from quire import env
from quire.config.engine_config import EngineConfig
from quire.config.options import Options
from quire.distributed.cluster_secret import require_cluster_secret
from quire.distributed.collectives import open_store
from quire.distributed.node_address import interface_of, listen_for_nodes
from quire.engine.startup.node_process import comparable_options
from quire.executors.node_head import NodeHead


def gather_nodes(
    config: EngineConfig, options: Options, listener_fd: int | None
) -> NodeHead | None:
    """Wait for the other machines of the model; None: there are none.

    listener_fd: of listen_for_nodes(), as inherited; None: this process listens. The caller must
    close what is returned. Raises ConfigError.
    """
    nodes, section = config.parallel.nodes, options.parallel
    if nodes == 1:
        return None
    secret = require_cluster_secret(section.cluster_secret_file, env.read(), f"nnodes={nodes}")
    listener = (
        listen_for_nodes(options)
        if listener_fd is None
        else socket.socket(fileno=os.dup(listener_fd))
    )
    assert listener is not None
    sizes, device = [config.parallel.ranks_per_node] * nodes, config.device.kind
    head = NodeHead(secret, listener, sizes, device, open_store)
    try:
        env.set_collective_variables(interface_of(head.endpoint.address))
        head.gather(comparable_options(options))
    except BaseException as error:
        head.end_ranks(f"the start failed: {error}")
        head.close()
        raise
    return head
