"""quire serve [MODEL]: the OpenAI-compatible server.

The address is taken first, so that a taken port is known before weights are read. Then the engine's
process and the API processes are started, side by side; this one watches them until SIGINT or
SIGTERM. If one of them dies the others end too, with status 1.
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
    """Until the server ends; the exit status. Raises what keeps it from starting."""
    level = options.observe.log_level or env.read().log_level
    start_process(level=level, style=server_options.log_format)
    check_files(options.model)
    listen_sockets.check_tls(server_options)
    listeners = listen_sockets.bind_sockets(server_options)
    return Supervisor(options, server_options, listeners, log_level=level).run()
