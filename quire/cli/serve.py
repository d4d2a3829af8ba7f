"""quire serve [MODEL]: the OpenAI-compatible server, in one process.

The address is taken first, so that a taken port is known before weights are read; then the engine
is built; then uvicorn runs the app until SIGINT or SIGTERM. Running requests may end, for
--shutdown-timeout seconds. If the engine dies so does the process, with status 1.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

import uvicorn

import quire
from quire import env
from quire import log as logs
from quire.cli.flags import parse
from quire.engine.build import Built, build
from quire.engine.client import EngineClient
from quire.engine.thread import EngineThread
from quire.errors import ConfigError, EngineDead, EngineError
from quire.server.app import create_app
from quire.server.options import ServerOptions
from quire.server.services import Services

log = logging.getLogger(__name__)

LAST_WORDS_S = 2
"""Time to send the last event of requests that were ended."""
EVERYWHERE = ("0.0.0.0", "::", "")


def main(argv: Sequence[str]) -> int:
    options, server_options = parse(argv)
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
        engine=EngineClient(EngineThread(built.engine), on_death=on_death),
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
