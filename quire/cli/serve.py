"""quire serve [MODEL]: the OpenAI-compatible server.

The address is taken first, so that a taken port is known before weights are read. Then the engine's
process and the API processes are started, side by side; this one watches them until SIGINT or
SIGTERM. If one of them dies the others end too, with status 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire import env
from quire.cli.flags import check_files, parse
from quire.config.environment import start_process
from quire.config.options import Options
from quire.server import listen
from quire.server.options import ServerOptions
from quire.server.supervisor import Supervisor


def main(argv: Sequence[str]) -> int:
    return serve(*parse(argv))


def serve(options: Options, server_options: ServerOptions) -> int:
    """Until the server ends; the exit status. Raises what keeps it from starting."""
    level = options.observe.log_level or env.read().log_level
    start_process(level=level, style=server_options.log_format)
    check_files(options.model)
    listen.check_tls(server_options)
    listeners = listen.take(server_options)
    return Supervisor(options, server_options, listeners, log_level=level).run()
