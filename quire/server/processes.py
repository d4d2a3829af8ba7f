"""An API process: uvicorn and the app, over an engine in another process.

Started by quire.server.supervisor while the engine's process reads the weights: what is imported
above main() is imported meanwhile. It ends when it is told to, or when its starter is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shlex
import shutil
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI

import quire
from quire.config.config import EngineConfig
from quire.config.environment import start_process
from quire.engine import collector
from quire.engine.client import EngineClient
from quire.engine.front import house_of, inputs_of, load_texts
from quire.engine.link import (
    Any_,
    Built,
    Condemned,
    Failed,
    Found,
    Link,
    Listening,
    RunServer,
    Stop,
    inherit,
)
from quire.engine.messages import fault_of
from quire.engine.pulse import Reader
from quire.engine.remote import EngineSocket
from quire.errors import ConfigError, EngineDead, QuireError, ShuttingDown
from quire.server import heads, listen
from quire.server.app import create_app
from quire.server.crew import Heart
from quire.server.health import Health
from quire.server.lobby import Lobby
from quire.server.options import ServerOptions
from quire.server.services import Services
from quire.server.splitting import parsers
from quire.text.readers import Readers, readers
from quire.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_REQUESTS = 10**9
"""That one process is thought to serve in its life."""
LAST_WORDS_S = 2
"""Time to send the last event of requests that were ended."""
REFRESH_S = 1.0
"""How often TLS files are looked at, if they may change."""


def main(fd: int) -> int:
    """Serve as told over the link; the exit status."""
    inherited = inherit(fd, RunServer, "quire-api")
    if inherited is None:
        return 1
    link, orders = inherited
    heart = Heart(orders)
    options = msgspec.convert(orders.options, ServerOptions)
    start_process(level=orders.log_level, style=options.log_format)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it means: read the key file again
    try:
        return _serve(orders, options, link, heart)
    except QuireError as error:
        link.send(Failed(fault=fault_of(error)))
        return 1
    finally:
        if link.ended:  # nobody is left to do it
            shutil.rmtree(orders.folder, ignore_errors=True)


def _serve(orders: RunServer, options: ServerOptions, link: Link, heart: Heart) -> int:
    """Get everything ready while the engine reads its weights, so that faults are told then."""
    listener = socket.socket(fileno=orders.sockets[0])
    lobby = Lobby(listener, options, started=orders.birth > 0)
    lobby.open()
    found = link.receive()
    if not isinstance(found, Found):
        return 0  # it is over already
    lobby.phase = "weights"
    tokenizer = load_texts(found.config, None if found.tokenizer is None else Path(found.tokenizer))
    if tokenizer is not None and found.config.model.chat_template is not None:
        tokenizer.template(found.config.model.chat_template)  # what is wrong with it is told now
    serving = Serving(orders, options, link, tokenizer, listener, heart)
    serving.prepare(found.config)
    built = link.receive()
    if not isinstance(built, Built):
        return 0
    if built.config.scheduler != found.config.scheduler:  # lengths, as its memory turned out
        serving.prepare(built.config)
    lobby.close()
    return serving.run()


class Serving:
    """The server and what it needs to end well."""

    def __init__(
        self,
        orders: RunServer,
        options: ServerOptions,
        link: Link,
        tokenizer: Tokenizer | None,
        listener: socket.socket,
        heart: Heart,
    ) -> None:
        self._orders = orders
        self._heart = heart
        self._options = options
        self._link = link
        self._tokenizer = tokenizer
        self._listener = listener
        self._read = None if orders.pulse is None else Reader(orders.pulse).read
        self._dead: EngineDead | None = None

    def prepare(self, config: EngineConfig) -> None:
        """Make the app for an engine of this config. Raises ConfigError."""
        transport = EngineSocket(
            self._orders.engine,
            self._orders.name,
            self._link,
            on_word=self._hear,
            gone="the server's first process is gone",
        )
        client = EngineClient(transport, on_death=self._on_death)
        client.wait_s = config.recovery.wait_s
        client.restarts = self._orders.restarts
        for fingerprint, left_s in self._orders.condemned:
            client.quarantine.put(fingerprint, left_s)
        client.on_condemned = self._tell_condemned
        self._client = client
        self._services = services_of(
            config, self._tokenizer, self._options, client, orders=self._orders
        )
        self._app = create_app(self._services)
        self._health = self._app.state.health = Health(client, self._read)
        self._health.started = self._orders.birth > 0 or self._orders.restarts > 0
        self._server = Server(
            uvicorn_config(self._options, self._app), ready=self._announce, ending=self._end
        )

    def run(self) -> int:
        """Serve until told to stop; the exit status."""
        if self._options.access_log:
            _show_access_log(self._options.disable_access_log_for_endpoints)
        self._server.run([self._listener])
        return 1 if self._dead is not None or not self._server.started else 0

    def _hear(self, word: Any_) -> None:
        if isinstance(word, Stop):
            self._server.should_exit = True
        elif isinstance(word, Condemned):
            self._client.condemn(word.fingerprint)

    def _tell_condemned(self, fingerprint: bytes) -> None:
        self._link.offer(Condemned(fingerprint=fingerprint))

    def _on_death(self, dead: EngineDead) -> None:
        self._dead = dead
        self._server.should_exit = True

    async def _end(self) -> None:
        """Streams without an end of their own end now. Requests have their time, and are then told
        so: no stream just breaks off.
        """
        self._health.draining = True
        self._app.state.live.end()
        await asyncio.sleep(self._options.shutdown_timeout)
        self._services.engine.end_streams(ShuttingDown("the server is shutting down"))

    def _announce(self) -> None:
        if self._options.enable_ssl_refresh:
            self._refreshing = asyncio.create_task(refresh_tls(self._server.config, self._options))
        if self._options.api_key_file is not None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self._app.state.keys.reload_soon)
        collector.slow_down()
        self._heart.turn()
        self._link.send(Listening(welcome=welcome(self._services, self._options, self._listener)))


class Server(uvicorn.Server):
    """uvicorn's server; says when it is ready and when it begins to end. Signals are not its."""

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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

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


def uvicorn_config(options: ServerOptions, app: FastAPI) -> uvicorn.Config:
    """What the options mean to uvicorn."""
    return uvicorn.Config(
        app,
        http=heads.protocol(options),
        ws="none",
        log_config=None,
        log_level=options.uvicorn_log_level,
        access_log=options.access_log,
        root_path=options.root_path,
        timeout_keep_alive=options.keep_alive_timeout,
        timeout_graceful_shutdown=options.shutdown_timeout + LAST_WORDS_S,
        lifespan="on",
        server_header=False,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
        ssl_ciphers=options.ssl_ciphers or "DEFAULT",
    )


def services_of(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    options: ServerOptions,
    client: EngineClient,
    *,
    orders: RunServer,
) -> Services:
    """What routes need, from an engine that is ready."""
    return Services(
        engine=client,
        inputs=inputs_of(config, tokenizer, process=orders.index + orders.count * orders.birth),
        tokenizer=tokenizer,
        chat_template=config.model.chat_template,
        names=config.model.served_names,
        max_model_len=config.scheduler.max_model_len,
        options=options,
        defaults=config.sampling.defaults,
        house=house_of(config),
        readers=_readers(options, tokenizer, config.model.chat_template),
        has_priorities=config.scheduler.policy == "priority",
        root=config.model.name,
        dtype=config.model.dtype,
        log_stats=config.observe.log_stats,
        shared_folder=Path(orders.folder) if orders.count > 1 else None,
        process=orders.index,
        _numbers=itertools.count(  # no id twice in one engine
            orders.index + orders.count * orders.birth * MOST_REQUESTS, orders.count
        ),
    )


def _readers(
    options: ServerOptions, tokenizer: Tokenizer | None, chat_template: str | None
) -> Readers | None:
    """What tells reasoning and tool calls from content. Raises ConfigError."""
    said = parsers(options)
    if said.reasoning is None and said.tools is None:
        return None
    if tokenizer is None:
        raise ConfigError("reasoning and tool parsers read text: this engine has no tokenizer")
    return readers(said, tokenizer, chat_template)


def welcome(services: Services, options: ServerOptions, listener: socket.socket) -> str:
    """What to print when the server is ready, with a command that works as it stands."""
    base = listen.shown(options, listener)
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
    if options.ssl_certfile is not None:
        words[1:1] = ["--cacert", options.ssl_certfile]
    if options.api_key or options.api_key_file:
        words += ["-H", "Authorization: Bearer YOUR_KEY"]
    words += ["-d", json.dumps({"model": services.names[0], **body})]
    return (
        f"quire {quire.__version__} serves {services.names[0]} on {base} (open it in a browser; "
        f"OpenAI API under /v1, routes at /docs). Try:\n  {shlex.join(words)}"
    )


async def refresh_tls(config: uvicorn.Config, options: ServerOptions) -> None:
    """Load the TLS files again whenever one of them has changed, for ever."""
    paths = [options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs]
    known = [_changed(path) for path in paths]
    while True:
        await asyncio.sleep(REFRESH_S)
        now = [_changed(path) for path in paths]
        if now == known or config.ssl is None:
            continue
        try:
            listen.load_tls(config.ssl, options)
        except (OSError, ValueError) as error:  # half of it is written: the next look may do
            log.warning("cannot use the new TLS files yet, going on with the old: %s", error)
            continue
        known = now
        log.info("the TLS files have changed: new connections use them")


def _changed(path: str | None) -> tuple[int, int, int] | None:
    """What differs when a file was written or replaced; a link's target counts."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _show_access_log(hidden: tuple[str, ...]) -> None:
    access = logging.getLogger("uvicorn.access")
    access.setLevel(logging.INFO)
    access.addFilter(shows(hidden))


def shows(hidden: Iterable[str]) -> Callable[[logging.LogRecord], bool]:
    """A filter of the access log that leaves out these paths, each alone or several with commas.

    Of all others it leaves out what stands behind the path: clients put keys there by mistake.
    """
    paths = {path.strip() for one in hidden for path in one.split(",")}

    def shown(record: logging.LogRecord) -> bool:
        args = record.args  # client, method, path with query, HTTP version, status
        if not isinstance(args, tuple) or len(args) < 3:
            return True
        path = str(args[2]).partition("?")[0]
        record.args = (*args[:2], path, *args[3:])
        return path not in paths

    return shown
