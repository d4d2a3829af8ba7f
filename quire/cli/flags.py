"""The flags of `quire serve`: one for each field of ServerOptions and of Options.

Nothing here imports the server or the engine, so that help and errors come at once.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import get_origin, get_type_hints

from quire.config.cli import OptionParser, add_options, options_from
from quire.config.options import Options
from quire.config.values import coerce
from quire.errors import ConfigError
from quire.server.options import ServerOptions

ABOUT = """Start the OpenAI-compatible server.

The address is taken first, so that a taken port is known before weights are read; then the engine
is built; then requests are answered until SIGINT or SIGTERM. Running requests may end, for
--shutdown-timeout seconds. If the engine dies so does the process, with status 1.
"""


def parse(argv: Sequence[str]) -> tuple[Options, ServerOptions]:
    """What a command line asks of the engine and of the server. Raises ConfigError."""
    args = serve_parser().parse_args(argv)
    server_options = server_options_from(args)
    own = {one.name for one in fields(ServerOptions)}
    others = {name: value for name, value in vars(args).items() if name not in own}
    return options_from(argparse.Namespace(**others)), server_options


def serve_parser() -> OptionParser:
    parser = OptionParser(prog="quire serve", usage="%(prog)s [MODEL] [options]")
    parser.description = ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    add_server_options(parser)
    add_options(parser)
    return parser


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of ServerOptions. Those not given do not appear in the namespace."""
    group = parser.add_argument_group("server options", ServerOptions.__doc__)
    hints, about = get_type_hints(ServerOptions), _field_docs(ServerOptions)
    for one in fields(ServerOptions):
        flag, text = f"--{one.name.replace('_', '-')}", about[one.name].replace("%", "%%")
        if hints[one.name] is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=argparse.SUPPRESS, help=text)
            continue
        group.add_argument(
            flag,
            dest=one.name,
            nargs="+" if get_origin(hints[one.name]) is tuple else None,
            default=argparse.SUPPRESS,
            metavar=one.name.rpartition("_")[2].upper(),
            help=text,
        )
    group.add_argument(
        "--disable-uvicorn-access-log", action="store_true", help="The default; see --access-log."
    )


def server_options_from(args: argparse.Namespace) -> ServerOptions:
    """ServerOptions of a parsed command line. Raises ConfigError."""
    hints = get_type_hints(ServerOptions)
    given = {name: value for name, value in vars(args).items() if name in hints}
    made = ServerOptions(
        **{name: coerce(name, hints[name], value) for name, value in given.items()}
    )
    if not 0 <= made.port <= 65535:
        raise ConfigError(f"port must be in [0, 65535], got {made.port}")
    if made.shutdown_timeout < 0:
        raise ConfigError(f"shutdown_timeout must be >= 0, got {made.shutdown_timeout}")
    return made


def _field_docs(kind: type) -> dict[str, str]:
    """Field -> the docstring under it."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef), node
    found: dict[str, str] = {}
    for target, text in zip(node.body, node.body[1:]):
        if isinstance(target, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(target.target, ast.Name), target.target
            assert isinstance(text.value, ast.Constant), f"{target.target.id} has no docstring"
            found[target.target.id] = " ".join(str(text.value.value).split())
    return found
