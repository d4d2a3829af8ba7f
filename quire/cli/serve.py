"""quire serve [MODEL]: starts the OpenAI-compatible server.

The address is bound first, so that a port in use is reported before weights are read. Then the
engine process and the API processes start in parallel; this process watches them until SIGINT or
SIGTERM, and replaces those that die (--max-engine-restarts).
"""

from __future__ import annotations

from collections.abc import Sequence

from quire import env
from quire.cli.serve_flags import check_files, parse
from quire.config.options import Options
from quire.config.vllm_environment import start_process
from quire.server.options import ServerOptions
from quire.server.process import listen_sockets
from quire.server.process.supervisor import Supervisor


def main(argv: Sequence[str]) -> int:
    return serve(*parse(argv))


def serve(options: Options, server_options: ServerOptions) -> int:
    """Run until the server ends; return the exit status. Raises errors that prevent the start."""
    level = options.observe.log_level or env.read().log_level
    start_process(level=level, style=server_options.log_format)
    check_files(options.model)
    listen_sockets.check_tls(server_options)
    listeners = listen_sockets.bind_sockets(server_options)
    return Supervisor(options, server_options, listeners, log_level=level).run()
