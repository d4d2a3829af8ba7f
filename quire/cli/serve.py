"""quire serve [MODEL]: starts the OpenAI-compatible server.

The address is bound first, so that a port in use is reported before weights are read. Then the
engine process and the API processes start in parallel; this process watches them until SIGINT or
SIGTERM, and replaces those that die (--max-engine-restarts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire import env
from quire.cli.serve_flags import check_files, parse
from quire.config.data_parallel import engine_layout
from quire.config.options import Options
from quire.config.vllm_environment import start_process
from quire.server.options import ServerOptions
from quire.server.process import listen_sockets
from quire.server.process.supervisor import Supervisor

if TYPE_CHECKING:
    from quire.distributed.cluster_secret import ClusterSecret


def main(argv: Sequence[str]) -> int:
    return serve(*parse(argv))


def serve(options: Options, server_options: ServerOptions) -> int:
    """Run until the server ends; return the exit status. Raises errors that prevent the start."""
    level = options.observe.log_level or env.read().log_level
    start_process(level=level, style=server_options.log_format)
    if options.parallel.nnodes > 1 and (options.parallel.headless or options.parallel.node_rank):
        from quire.engine.startup.node_process import run_headless

        return run_headless(options, log_level=level)
    layout = engine_layout(options)
    secret = None
    if layout.address is not None:
        secret = _cluster_secret(options, layout.address)
    check_files(options.model)
    if options.parallel.headless:
        from quire.engine.cluster.engine_node import EngineNode  # ZeroMQ: other servers need none

        node = EngineNode(
            options,
            layout,
            secret,
            log_level=level,
            log_style=server_options.log_format,
            drain_s=server_options.shutdown_timeout,
        )
        return node.run()
    listen_sockets.check_tls(server_options)
    listeners = listen_sockets.bind_sockets(server_options)
    return Supervisor(
        options, server_options, listeners, log_level=level, layout=layout, secret=secret
    ).run()


def _cluster_secret(options: Options, address: str) -> ClusterSecret | None:
    """Return the secret of engines on several machines; loopback needs none. Raises ConfigError."""
    from quire.distributed.cluster_secret import (
        is_loopback,
        read_cluster_secret,
        require_cluster_secret,
    )

    file = options.parallel.cluster_secret_file
    if is_loopback(address):
        return read_cluster_secret(file, env.read())
    return require_cluster_secret(file, env.read(), f"data_parallel_address={address}")
