"""quire serve [MODEL]: the OpenAI-compatible server, in one process.

The address is taken first, so that a taken port is known before weights are read; then the engine
is built; then uvicorn runs the app until SIGINT or SIGTERM. Running requests may end, for
--shutdown-timeout seconds. If the engine dies so does the process, with status 1.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import inspect
import json
import logging
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_origin, get_type_hints

import uvicorn

import quire
from quire import env
from quire import log as logs
from quire.config.cli import OptionParser, add_options, options_from
from quire.config.values import coerce
from quire.engine.build import Built, build
from quire.engine.client import EngineClient
from quire.errors import ConfigError, EngineDead, EngineError
from quire.server.app import create_app
from quire.server.options import ServerOptions
from quire.server.services import Services

log = logging.getLogger(__name__)

LAST_WORDS_S = 2
"""Time to send the last event of requests that were ended."""
EVERYWHERE = ("0.0.0.0", "::", "")


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    server_options = server_options_from(args)
    own = {one.name for one in fields(ServerOptions)}
    options = options_from(
        argparse.Namespace(**{name: v for name, v in vars(args).items() if name not in own})
    )
    logs.setup(options.observe.log_level or env.read().log_level)
    listener = _listener(server_options)
    built = build(options, server=True)
    return _Serving(built, server_options, listener).run()


class _Serving:
    """The server and what it needs to end well."""

    def __init__(self, built: Built, options: ServerOptions, listener: socket.socket) -> None:
        self._options = options
        self._listener = listener
        self._dead: EngineDead | None = None
        self._services = services_of(built, options, on_death=self._on_death)
        self._server = _Server(
            uvicorn.Config(
                create_app(self._services),
                log_config=None,
                log_level=options.uvicorn_log_level,
                access_log=options.access_log,
                root_path=options.root_path,
                timeout_graceful_shutdown=options.shutdown_timeout + LAST_WORDS_S,
                lifespan="on",
                server_header=False,
            ),
            ready=self._announce,
            ending=self._end,
        )

    def run(self) -> int:
        """Serve until told to stop; the exit status."""
        if self._options.access_log:
            _show_access_log()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)  # uvicorn drains, and then raises the signal again
        try:
            self._server.run([self._listener])
        finally:
            if self._options.uds is not None:
                Path(self._options.uds).unlink(missing_ok=True)
        return 1 if self._dead is not None or not self._server.started else 0

    def _on_death(self, dead: EngineDead) -> None:
        self._dead = dead
        self._server.should_exit = True

    async def _end(self) -> None:
        """When running requests have had their time, tell them so: no stream just breaks off."""
        await asyncio.sleep(self._options.shutdown_timeout)
        self._services.engine.end_streams(EngineError("the server is shutting down"))

    def _announce(self) -> None:
        print(welcome(self._services, self._options, self._listener), flush=True)
        gc.collect()
        gc.freeze()  # what start-up made stays: no collection need look at it


class _Server(uvicorn.Server):
    """uvicorn's server; says when it is ready and when it begins to end."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        ready: Callable[[], None],
        ending: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._ending = ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._ending())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def services_of(
    built: Built, options: ServerOptions, *, on_death: Callable[[EngineDead], None] | None = None
) -> Services:
    """What routes need, from an engine that was built."""
    config = built.config
    return Services(
        engine=EngineClient(built.engine, on_death=on_death),
        inputs=built.inputs,
        tokenizer=built.tokenizer,
        chat_template=config.model.chat_template,
        names=config.model.served_names,
        max_model_len=config.scheduler.max_model_len,
        options=options,
        defaults=config.sampling.defaults,
        has_priorities=config.scheduler.policy == "priority",
        root=config.model.name,
    )


def welcome(services: Services, options: ServerOptions, listener: socket.socket) -> str:
    """What to print when the server is ready, with a command that works as it stands."""
    base = f"http://{_reachable(options, listener)}"
    has_template = services.tokenizer is not None and bool(
        services.chat_template or services.tokenizer.templates
    )
    path, body = "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}
    if has_template:
        ask = {"role": "user", "content": "What is the capital of France?"}
        path, body = "/v1/chat/completions", {"messages": [ask]}
    words = ["curl", f"{base}{path}", "-H", "Content-Type: application/json"]
    if options.uds is not None:
        words[1:1] = ["--unix-socket", options.uds]
    if options.api_key:
        words += ["-H", "Authorization: Bearer YOUR_KEY"]
    words += ["-d", json.dumps({"model": services.names[0], **body})]
    return (
        f"quire {quire.__version__} serves {services.names[0]} on {base} "
        f"(OpenAI API under /v1, routes at /docs). Try:\n  {shlex.join(words)}"
    )


def _reachable(options: ServerOptions, listener: socket.socket) -> str:
    if options.uds is not None:
        return "localhost"
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host in EVERYWHERE else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listener(options: ServerOptions) -> socket.socket:
    """A bound socket. It listens when the server is ready: until then clients are refused."""
    where = options.uds or f"{options.host}:{options.port}"
    try:
        if options.uds is not None:
            return _unix_listener(Path(options.uds))
        family, kind, proto, _, address = socket.getaddrinfo(
            options.host or None, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        hint = "choose another with --host and --port" if options.uds is None else "choose another"
        raise ConfigError(f"cannot listen on {where}: {error}; {hint}") from None
    return made


def _unix_listener(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError("another server listens there")
        path.unlink()  # of a server that ended
    made.bind(str(path))
    path.chmod(0o600)
    return made


def _leave(signum: int, frame: object) -> NoReturn:
    raise SystemExit(0)


def _show_access_log() -> None:
    access = logging.getLogger("uvicorn.access")
    access.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(logs.FORMAT, datefmt="%m-%d %H:%M:%S"))
    access.addHandler(handler)


# -- flags ------------------------------------------------------------------------------------


def _parser() -> OptionParser:
    parser = OptionParser(prog="quire serve", usage="%(prog)s [MODEL] [options]")
    parser.description = __doc__
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
