"""API process: runs uvicorn and the app over an engine in another process.

quire.server.process.supervisor starts it while the engine process reads the weights: the imports
above main() run meanwhile. It ends on request, or when its parent is gone.
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
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI

import quire
from quire.config.engine_config import EngineConfig
from quire.config.vllm_environment import start_process
from quire.distributed.cluster_secret import ClusterSecret
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_pool import EnginePool
from quire.engine.client.tcp_transport import TcpTransport
from quire.engine.client.zmq_transport import EngineEvents, ZmqTransport
from quire.engine.core import gc_control
from quire.engine.heartbeat_page import HeartbeatReader
from quire.engine.messages import error_to_wire
from quire.engine.startup.text_setup import (
    build_input_processor,
    build_pooling_processor,
    load_engine_tokenizer,
    structured_defaults,
)
from quire.engine.supervise.process_pipe import (
    AnyControlMessage,
    EngineDraining,
    EngineStarted,
    InputBlocked,
    ModelLocated,
    ProcessFailed,
    ProcessPipe,
    RunApiProcess,
    ServerListening,
    StopProcess,
    ignore_signals,
    receive_orders,
)
from quire.errors import ConfigError, EngineDead, QuireError, RequestError, ShuttingDown
from quire.sandbox.heap import keep_freed_memory
from quire.server.app import create_app
from quire.server.app_state import AppState
from quire.server.options import ServerOptions
from quire.server.process import http_protocol, listen_sockets
from quire.server.process.api_process_monitor import HeartbeatTask
from quire.server.process.startup_server import StartupServer
from quire.server.routes.health import HealthState
from quire.text.output.answer_parser import (
    AnswerParserFactory,
    ParserOptions,
    build_answer_parser_factory,
)
from quire.text.tokenizing.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_REQUESTS = 10**9
"""That one process is thought to serve in its life."""
FINAL_EVENT_GRACE_S = 2
"""Time to send the last event of requests that were ended."""
EARLY_ERROR_FACTOR = 1.5
"""Wait for early errors over the processor time that compiling a grammar may take."""
DRAIN_LOG_INTERVAL_S = 5.0
"""Between two lines of the log about requests that a shutdown waits for."""
TLS_POLL_INTERVAL_S = 1.0
"""How often TLS files are looked at, if they may change."""


def main(fd: int) -> int:
    """Serve as ordered over the pipe. Returns the exit status."""
    ignore_signals()
    inherited = receive_orders(fd, RunApiProcess, "quire-api")
    if inherited is None:
        return 1
    link, orders = inherited
    heart = HeartbeatTask(orders)
    options = msgspec.convert(orders.options, ServerOptions)
    start_process(level=orders.log_level, style=options.log_format)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it means: read the files again
    try:
        return _serve(orders, options, link, heart)
    except QuireError as error:
        link.send(ProcessFailed(error=error_to_wire(error)))
        return 1
    finally:
        if link.peer_closed:  # no other process is left to do it
            shutil.rmtree(orders.folder, ignore_errors=True)


def _serve(
    orders: RunApiProcess, options: ServerOptions, link: ProcessPipe, heart: HeartbeatTask
) -> int:
    """Prepare everything while the engine reads its weights, so that faults are seen early."""
    listener = socket.socket(fileno=orders.socket_fds[0])
    lobby = StartupServer(listener, options, started=orders.incarnation > 0)
    lobby.open()
    found = link.receive()
    if not isinstance(found, ModelLocated):
        return 0  # it is over already
    lobby.on_model_located()
    tokenizer = load_engine_tokenizer(
        found.config, None if found.tokenizer_folder is None else Path(found.tokenizer_folder)
    )
    if tokenizer is not None:
        compile_templates(tokenizer, found.config.model.chat_template)
    serving = ApiServer(orders, options, link, tokenizer, listener, heart)
    serving.prepare(found.config)
    built = link.receive()
    if not isinstance(built, EngineStarted):
        return 0
    if built.config.scheduler != found.config.scheduler:  # lengths, as its memory turned out
        serving.prepare(built.config)
    serving.set_addresses(built.addresses)
    lobby.close()
    return serving.run()


class ApiServer:
    """The server and what it needs to end well."""

    def __init__(
        self,
        orders: RunApiProcess,
        options: ServerOptions,
        link: ProcessPipe,
        tokenizer: Tokenizer | None,
        listener: socket.socket,
        heart: HeartbeatTask,
    ) -> None:
        self._orders = orders
        self._heartbeat = heart
        self._options = options
        self._pipe = link
        self._tokenizer = tokenizer
        self._listener = listener
        self._read_heartbeats = [HeartbeatReader(fd).read for fd in orders.engine_heartbeat_fds]
        self._dead: EngineDead | None = None

    def prepare(self, config: EngineConfig) -> None:
        """Make the app for an engine of this config. Raises ConfigError."""
        orders = self._orders
        events = EngineEvents(
            self._pipe, on_message=self._handle_message, gone="the server's first process is gone"
        )
        clients, local = [], len(orders.engine_heartbeat_fds)
        secret = None
        if orders.cluster_secret is not None:
            secret = ClusterSecret(orders.cluster_secret.encode())
        self._transports: list[ZmqTransport] = []
        for index in range(orders.engines):
            name = orders.client_name
            self._transports.append(
                ZmqTransport("", name, events, index)
                if index < local
                else TcpTransport("", name, events, index, secret)
            )
            client = EngineClient(self._transports[-1])
            client.restart_wait_s = config.recovery.wait_s
            client.restarts = orders.engine_restarts[index]
            for fingerprint, left_s in orders.blocked_inputs:
                client.blocklist.add(fingerprint, left_s)
            clients.append(client)
        self._engines = EnginePool(
            clients,
            cache_tokens=config.cache.num_blocks * config.cache.block_size,
            on_death=self._on_engine_death,
            first_rank=orders.first_rank,
        )
        self._engines.on_input_blocked = self._report_blocked_input
        self._engines.on_draining = self._report_draining
        self._app_state = build_app_state(
            config, self._tokenizer, self._options, self._engines, orders=orders
        )
        self._app = create_app(self._app_state)
        self._health = self._app.state.health = HealthState(self._engines, self._read_heartbeats)
        self._health.started = orders.incarnation > 0 or any(orders.engine_restarts)
        self._server = UvicornServer(
            uvicorn_config(self._options, self._app),
            ready=self._announce_ready,
            ending=self._end_streams,
        )

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Set where the engines listen, before run()."""
        for transport, address in zip(self._transports, addresses, strict=True):
            transport.address = address

    def run(self) -> int:
        """Serve until it is stopped. Returns the exit status."""
        if self._options.access_log:
            _enable_access_log(self._options.disable_access_log_for_endpoints)
        self._server.run([self._listener])
        return 1 if self._dead is not None or not self._server.started else 0

    def _handle_message(self, word: AnyControlMessage) -> None:
        if isinstance(word, StopProcess):
            self._server.should_exit = True
        elif isinstance(word, InputBlocked):
            self._engines.block_fingerprint(word.fingerprint)
        elif isinstance(word, EngineDraining):
            self._engines.set_draining(word.engine, word.move_after_s)

    def _report_blocked_input(self, fingerprint: bytes) -> None:
        self._pipe.try_send(InputBlocked(fingerprint=fingerprint))

    def _report_draining(self, engine: int, move_after_s: float | None) -> None:
        self._pipe.try_send(EngineDraining(engine=engine, move_after_s=move_after_s))

    def _on_engine_death(self, dead: EngineDead) -> None:
        self._dead = dead
        self._server.should_exit = True

    async def _end_streams(self) -> None:
        """Streams without an end of their own end now. Requests have their time, and then get
        an error: no stream just breaks off.
        """
        self._health.draining = True
        for feed in self._app.state.live:
            feed.shut_down()
        active, most = self._app_state.active_requests, self._options.shutdown_timeout
        end = time.monotonic() + most
        while (left := end - time.monotonic()) > 0:
            log.info("shutdown: waiting for %d requests, at most %.0f s", len(active), left)
            await asyncio.sleep(min(left, DRAIN_LOG_INTERVAL_S))
        if active:
            log.warning("shutdown: %d requests get an error: %d s are over", len(active), most)
        self._app_state.engine.fail_streams(ShuttingDown("the server is shutting down"))

    def _announce_ready(self) -> None:
        if self._options.enable_ssl_refresh:
            self._refreshing = asyncio.create_task(refresh_tls(self._server.config, self._options))
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload_files)
        gc_control.raise_gc_threshold()
        self._heartbeat.start_on_loop()
        self._pipe.send(
            ServerListening(banner=startup_message(self._app_state, self._options, self._listener))
        )

    def _reload_files(self) -> None:
        """Read the key file and the TLS files now."""
        if self._options.api_key_file is not None:
            self._app.state.keys.schedule_reload()
        if self._server.config.tls is not None:
            reload_tls(self._server.config.tls, self._options)


class UvicornConfig(uvicorn.Config):
    """uvicorn's config, with TLS that quire.server.process.http_protocol begins."""

    tls: ssl.SSLContext | None = None

    def load(self) -> None:
        super().load()
        self.tls, self.ssl = self.ssl, None
        if self.tls is not None:
            self.http_protocol_class = partial(  # type: ignore[assignment]
                http_protocol.TlsHandshake, self.http_protocol_class, self.tls
            )


class UvicornServer(uvicorn.Server):
    """uvicorn's server; calls back when it is ready and when it ends. It handles no signals."""

    config: UvicornConfig

    def __init__(
        self,
        config: UvicornConfig,
        *,
        ready: Callable[[], None],
        ending: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        super().__init__(config)
        self._on_ready = ready
        self._on_ending = ending

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._on_ending())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def uvicorn_config(options: ServerOptions, app: FastAPI) -> UvicornConfig:
    """Make uvicorn's config of the options."""
    return UvicornConfig(
        app,
        http=http_protocol.build_http_protocol(options),
        ws="none",
        log_config=None,
        log_level=options.uvicorn_log_level,
        access_log=options.access_log,
        backlog=http_protocol.listen_backlog(),
        timeout_keep_alive=options.keep_alive_timeout,
        timeout_graceful_shutdown=options.shutdown_timeout + FINAL_EVENT_GRACE_S,
        lifespan="on",
        server_header=False,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
        ssl_ciphers=options.ssl_ciphers or "DEFAULT",
    )


def compile_templates(tokenizer: Tokenizer, chat_template: str | None) -> None:
    """Compile the templates of chats: a long one takes 0.4 s, in which no other client is answered.

    Raises RequestError if the given one is invalid. Those of a tokenizer may be: chats fail then.
    """
    if chat_template is not None:
        tokenizer.template(chat_template)
        return
    for name in tokenizer.templates.named:
        try:
            tokenizer.template(name)
        except RequestError as error:
            log.warning("chats with the tokenizer's template %r will fail: %s", name, error)


def build_app_state(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    options: ServerOptions,
    engines: EnginePool,
    *,
    orders: RunApiProcess,
) -> AppState:
    """Build the state of the routes, for an engine that is ready."""
    number = orders.index + orders.count * orders.incarnation
    inputs = build_input_processor(config, tokenizer, process=number)
    if inputs.media is not None:
        keep_freed_memory()
    return AppState(
        engine=engines,
        inputs=inputs,
        pooling=build_pooling_processor(config, tokenizer, inputs.media),
        generates=config.generates,
        tokenizer=tokenizer,
        chat_template=config.model.chat_template,
        served_model_names=config.model.served_names,
        max_model_len=config.scheduler.max_model_len,
        options=options,
        defaults=config.sampling.defaults,
        structured_defaults=structured_defaults(config),
        early_error_wait_s=EARLY_ERROR_FACTOR * config.structured.compile_seconds,
        answer_parsers=_build_answer_parsers(options, tokenizer, config.model.chat_template),
        has_priority_scheduling=config.scheduler.policy == "priority",
        root=config.model.name,
        dtype=config.model.dtype,
        quantization=config.model.quantization,
        weight_bits=config.model.weight_bits,
        log_stats=config.observe.log_stats,
        counters_folder=Path(orders.folder) if orders.count > 1 else None,
        process_index=orders.index,
        serves_adapters=config.adapters is not None,
        _request_numbers=itertools.count(  # no id twice in one engine
            orders.index + orders.count * orders.incarnation * MAX_REQUESTS, orders.count
        ),
    )


def _build_answer_parsers(
    options: ServerOptions, tokenizer: Tokenizer | None, chat_template: str | None
) -> AnswerParserFactory | None:
    """The parsers of reasoning and tool calls. Raises ConfigError."""
    said = _parser_options(options)
    if said.reasoning is None and said.tools is None and not any(said.reasoning_marks):
        return None
    if tokenizer is None:
        raise ConfigError("reasoning and tool parsers read text: this engine has no tokenizer")
    return build_answer_parser_factory(said, tokenizer, chat_template)


def _parser_options(options: ServerOptions) -> ParserOptions:
    """The parsers that the options name. That of tools is used with --enable-auto-tool-choice."""
    return ParserOptions(
        options.reasoning_parser,
        options.tool_call_parser if options.enable_auto_tool_choice else None,
        options.reasoning_parser_plugin,
        options.tool_parser_plugin,
        (
            options.reasoning_config.get("reasoning_start_str") or "",
            options.reasoning_config.get("reasoning_end_str") or "",
        ),
    )


_POOLING_PATHS = {"embed": "/v1/embeddings", "classify": "/classify"}
"""Task of a model -> its route."""


def startup_message(services: AppState, options: ServerOptions, listener: socket.socket) -> str:
    """The text to print when the server is ready, with a command that works as it is."""
    base = listen_sockets.listener_url(options, listener)
    has_template = services.tokenizer is not None and bool(
        services.chat_template or services.tokenizer.templates
    )
    prompt = "Once upon a time" if services.tokenizer is not None else [1, 2, 3]
    path = "/v1/completions"
    body: dict[str, object] = {"prompt": prompt, "max_tokens": 32}
    if has_template:
        ask = {"role": "user", "content": "What is the capital of France?"}
        path, body = "/v1/chat/completions", {"messages": [ask]}
    if services.pooling is not None and not services.generates:
        task = services.pooling.section.tasks[0]
        path = _POOLING_PATHS.get(task, "/pooling")
        body = {"input": prompt}
    words = ["curl", f"{base}{path}", "-H", "Content-Type: application/json"]
    if options.uds is not None:
        words[1:1] = ["--unix-socket", options.uds]
    if options.ssl_certfile is not None:
        words[1:1] = ["--cacert", options.ssl_certfile]
    if options.ssl_cert_reqs == ssl.CERT_REQUIRED:
        words += ["--cert", "YOUR_CERTIFICATE"]
    words += ["-d", json.dumps({"model": services.served_model_names[0], **body})]
    command = shlex.join(words)
    if options.api_key or options.api_key_file:  # the shell fills the key in
        command += ' -H "Authorization: Bearer $QUIRE_API_KEY"'
    docs = "" if options.disable_fastapi_docs else ", routes at /docs"
    return (
        f"quire {quire.__version__} serves {services.served_model_names[0]} on {base} "
        f"(open it in a browser; OpenAI API under /v1{docs}). "
        f"Try:\n  {command}"
    )


async def refresh_tls(config: UvicornConfig, options: ServerOptions) -> None:
    """Load the TLS files again whenever one of them has changed, for ever."""
    paths = [options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs]
    known = [_file_stamp(path) for path in paths]
    while True:
        await asyncio.sleep(TLS_POLL_INTERVAL_S)
        now = [_file_stamp(path) for path in paths]
        if now == known or config.tls is None:
            continue
        if reload_tls(config.tls, options):  # else half of it is written: the next look may do
            known = now


def reload_tls(context: ssl.SSLContext, options: ServerOptions) -> bool:
    """Load the TLS files for new connections. False: they cannot be used, and nothing changes."""
    try:
        listen_sockets.load_tls(context, options)
    except (OSError, ValueError) as error:
        log.warning("cannot use the TLS files, and continue with the old ones: %s", error)
        return False
    log.info("the TLS files were read again: new connections use them")
    return True


def _file_stamp(path: str | None) -> tuple[int, int, int] | None:
    """Numbers that change when a file is written or replaced; a link's target counts."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _enable_access_log(hidden: tuple[str, ...]) -> None:
    access = logging.getLogger("uvicorn.access")
    access.setLevel(logging.INFO)
    access.addFilter(build_access_log_filter(hidden))


def build_access_log_filter(hidden: Iterable[str]) -> Callable[[logging.LogRecord], bool]:
    """A filter of the access log that leaves out these paths, each alone or several with commas.

    All other lines lose their query: clients put keys there by mistake.
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
