"""Supervisor of `quire serve`: starts one or more engine processes and API processes.

It handles signals, and ends all of them together. It imports neither torch nor the server, so that
the others start at once, side by side. It holds a pipe to each of them. A pipe that closes means
that its process is gone: another is started, as often as is allowed. When the supervisor itself is
gone, however it ended, their ends of the pipes close and they end too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from quire import env
from quire.config.data_parallel import EngineLayout, engine_layout
from quire.config.options import Options
from quire.core.admission.request_blocklist import RequestBlocklist
from quire.engine.messages import error_from_wire
from quire.engine.startup.startup_timer import format_server_start, process_age
from quire.engine.supervise.engine_group import EngineGroup
from quire.engine.supervise.engine_restarter import RestartBudget
from quire.engine.supervise.liveness import CHECK_INTERVAL_S
from quire.engine.supervise.process_launcher import (
    describe_exit,
)
from quire.engine.supervise.process_pipe import (
    AnyControlMessage,
    ChildProcess,
    EngineDraining,
    EngineTerminated,
    InputBlocked,
    ProcessFailed,
    RestartEngine,
    RunApiProcess,
    ServerListening,
    StopProcess,
)
from quire.log import BestEffortStream
from quire.server.options import ServerOptions
from quire.server.process.api_process_monitor import ApiChildProcess

if TYPE_CHECKING:
    from quire.distributed.cluster_secret import ClusterSecret
    from quire.engine.cluster.remote_engines import RemoteEngines

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Beyond the time that requests have, for what ends to end; then it is killed."""
OPEN_FILES_LIMIT = 65536


class Supervisor:
    """All processes of one server."""

    def __init__(
        self,
        options: Options,
        server_options: ServerOptions,
        listeners: list[socket.socket],
        *,
        log_level: str,
        layout: EngineLayout | None = None,
        secret: ClusterSecret | None = None,
    ) -> None:
        """layout: None: all engines are on this node. secret: of the machines that have engines."""
        layout = layout or engine_layout(options)
        local_options = layout.local_options(options)
        self._secret = secret
        self._first_rank = layout.served.start
        self._options = server_options
        self._listeners = listeners
        self._log_level = log_level
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._stopping = False
        self._deadline: float | None = None
        self._status = 0
        self._killed: set[ChildProcess] = set()
        self._ready_messages: dict[ChildProcess, str] = {}
        self._is_announced = False
        self._next_check_at = 0.0
        self._api_processes: list[ApiChildProcess] = []
        self._api_start_s: float | None = None  # what the slowest of the first took
        self._blocklist = RequestBlocklist()  # what any of them has put into its own
        self._names: list[str] = []  # of the API processes
        self._replacements = 0  # of API processes in place of others
        recovery = options.recovery
        window = recovery.engine_restart_window
        self._api_restarts = RestartBudget(recovery.max_engine_restarts, window)
        once = len(listeners) == 1 and not recovery.max_engine_restarts
        self._remote: RemoteEngines | None = None
        if layout.remote:
            from quire.engine.cluster.remote_engines import RemoteEngines  # ZeroMQ

            self._remote = RemoteEngines(layout, options, secret)
        self._engines = EngineGroup(
            local_options,
            env.read().cache_dir,
            log_level=log_level,
            log_style=server_options.log_format,
            clients=1 if once else None,
            remote=self._remote,
        )

    def run(self) -> int:
        """Until all has ended; the exit status. Raises what kept the server from starting."""
        _raise_open_files_limit()
        with self._signal_socket() as ear:
            self._selector.register(ear, selectors.EVENT_READ, None)
            try:
                self._start()
                while self._live_api_processes():
                    self._process_events(ear)
            finally:
                self._clean_up()
        return self._status

    def _start(self) -> None:
        """The engines first: they take longest."""
        self._engines.start()
        for engine in self._engines.children:
            self._register(engine)
        if self._remote is not None:
            self._register(self._remote)
        for index in range(len(self._listeners)):
            self._names.append(f"api-{index}")
            self._api_processes.append(self._start_api(index, 0))

    def _start_api(self, index: int, birth: int) -> ApiChildProcess:
        listener = self._listeners[index]  # stays ours, too: a dead one's goes to the next
        engines, limit_s = self._engines, self._options.api_watchdog_seconds
        child = ApiChildProcess([listener, *engines.heartbeat_files], limit_s, self._api_start_s)
        orders = RunApiProcess(
            options=dataclasses.asdict(self._options),
            folder=engines.folder,
            engines=len(engines),
            first_rank=self._first_rank,
            cluster_secret=None if self._secret is None else self._secret.secret.decode(),
            client_name=self._names[index],
            index=index,
            count=self._options.api_server_count,
            incarnation=birth,
            engine_restarts=tuple(engines.restart_counts),
            engine_heartbeat_fds=tuple(page.fileno() for page in engines.heartbeat_files),
            heartbeat_fd=child.heartbeat_file.fileno(),
            stacks_fd=child.stacks_file.fileno(),
            blocked_inputs=tuple(self._blocklist.entries()),
            socket_fds=[listener.fileno()],
            log_level=self._log_level,
        )
        child.pipe.send(orders)
        self._register(child)
        return child

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _register(self, child: ChildProcess | RemoteEngines) -> None:
        self._selector.register(child.pipe.fileno(), selectors.EVENT_READ, child)

    def _live_api_processes(self) -> list[ApiChildProcess]:
        """API processes with an open pipe."""
        watched = [key.data for key in self._selector.get_map().values()]
        return [child for child in self._api_processes if child in watched]

    def _process_events(self, ear: socket.socket) -> None:
        left = CHECK_INTERVAL_S if self._checks_liveness else None
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
        for key, _ in self._selector.select(left):
            if key.data is None:
                ear.recv(64)
                self._handle_signals()
            else:
                self._handle_message(key.data)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            log.error("what runs did not end in time: it is killed")
            self._kill_processes(*self._api_processes)
            self._status = 1
        if not self._stopping and time.monotonic() >= self._next_check_at:
            self._next_check_at = time.monotonic() + CHECK_INTERVAL_S
            self._check_liveness()

    def _check_liveness(self) -> None:
        """End the processes that nothing else ends."""
        for engine, why in self._engines.check_liveness():
            self.restart(engine, why)
        for (
            child
        ) in self._api_processes:  # one that hangs gets its share of connections, and answers none
            if child.check_liveness() is not None:
                child.process.kill()

    @property
    def _checks_liveness(self) -> bool:
        return self._engines.check_interval_s is not None or self._options.api_watchdog_seconds > 0

    def _handle_message(self, child: ChildProcess | RemoteEngines) -> None:
        word = child.pipe.receive()
        if word is None:
            assert isinstance(child, ChildProcess), "the thread for other nodes has ended"
            self._selector.unregister(child.pipe.fileno())
            self._on_child_exit(child)
            return
        if self._engines.owns(child):
            told = self._engines.handle(child, word)
            if told is not None:
                self._broadcast(told)
        elif not isinstance(child, ChildProcess):
            return
        elif isinstance(word, InputBlocked):
            self._blocklist.add(word.fingerprint)  # for those that are yet to be started
            self._forward(child, word)
        elif isinstance(word, EngineDraining):
            self._engines.set_draining(word)
            self._forward(child, word)
        elif isinstance(word, ServerListening):
            self._on_api_ready(child, word.banner)
        elif isinstance(word, RestartEngine):
            self.restart(word.engine, word.reason)
        elif isinstance(word, ProcessFailed) and not self._replacements:
            raise error_from_wire(word.error)
        if child.pipe.has_message:
            self._handle_message(child)

    def _on_api_ready(self, child: ChildProcess, welcome: str) -> None:
        self._ready_messages[child] = welcome
        if len(self._ready_messages) == len(self._api_processes) and not self._is_announced:
            self._is_announced = True
            self._api_start_s = max(one.age_s for one in self._api_processes)
            self._log_start()
            print(welcome, file=BestEffortStream(sys.stdout), flush=True)  # what people wait for

    def _log_start(self) -> None:
        built = self._engines.all_started
        assert built is not None, "ready without an engine"
        opening = time.monotonic() - self._engines.started_at
        log.info("%s", format_server_start(process_age(), built.startup_seconds, opening))

    def _forward(self, who: ChildProcess, word: InputBlocked | EngineDraining) -> None:
        """Send a message of an API process to the others."""
        for child in self._api_processes:
            if child is not who:
                child.pipe.try_send(word)  # one that does not read hangs, and is soon ended

    def restart(self, engine: int, reason: str) -> None:
        """End an engine at once and start another. Its streams continue."""
        if not self._stopping:
            log.error("engine %d is ended: %s", engine, reason)
            self._engines.restart(engine, reason)

    def _broadcast(self, word: AnyControlMessage) -> None:
        for child in self._api_processes:
            child.pipe.send(word)

    # -- ends -----------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        """End at the first signal, and at once at a second Ctrl-C; reload files at SIGHUP."""
        numbers, self._signals = self._signals, []
        if signal.SIGHUP in numbers:
            numbers = [one for one in numbers if one != signal.SIGHUP]
            self._reload_files()
        if self._stopping and signal.SIGINT in numbers:
            self._kill_processes(*self._api_processes)
            self._status = 1
        elif numbers:
            if not self._stopping:
                log.info(
                    "%s: no new connections; running requests may take %d s more "
                    "(--shutdown-timeout)",
                    signal.Signals(numbers[0]).name,
                    self._options.shutdown_timeout,
                )
            self._begin_shutdown()

    def _reload_files(self) -> None:
        """SIGHUP: the API processes read their files again. A closed terminal sends it too."""
        if self._options.api_key_file is None and self._options.ssl_certfile is None:
            log.info("SIGHUP is ignored: there is no key file and no TLS file to read again")
            return
        for child in self._ready_messages:  # others have just read them
            child.process.send_signal(signal.SIGHUP)

    def _on_child_exit(self, child: ChildProcess) -> None:
        """A process is gone. That of itself is right only when all are ending."""
        status = child.process.wait()
        if self._stopping and (not status or child in self._killed):
            return
        if isinstance(child, ApiChildProcess):
            why = self._on_api_exit(child, f"an API process ended: {describe_exit(status)}")
        else:
            why = self._on_engine_exit(child, f"an engine's process ended: {describe_exit(status)}")
        if why is None:
            return
        if not self._status:
            log.error("%s", why)
        self._status = 1
        self._begin_shutdown()

    def _on_engine_exit(self, child: ChildProcess, why: str) -> str | None:
        """Start another, if that may be; else why all is over, None if other engines live."""
        if self._stopping:
            return why
        told, successor = self._engines.on_exit(child)
        self._broadcast(told)
        if successor is not None:
            self._register(successor)
        elif isinstance(told, EngineTerminated):
            if self._engines.is_lost:
                return told.reason
            log.error("engine %d is not replaced: %s", told.engine, told.reason)
        return None

    def _on_api_exit(self, child: ApiChildProcess, why: str) -> str | None:
        """Start another in its place, if it has served."""
        index = self._api_processes.index(child)
        child.log_crash_stacks()
        served = self._ready_messages.pop(child, None) is not None
        if self._stopping or not served:
            return why
        if not self._api_restarts.try_take():
            return why
        log.error("%s; its connections are lost, and another is being started", why)
        self._engines.remove_client(self._names[index])
        child.close()
        self._replacements += 1
        self._names[index] = f"api-{index}.{self._replacements}"
        self._api_processes[index] = self._start_api(index, self._replacements)
        for word in self._engines.current_state():
            self._api_processes[index].pipe.send(word)
        return None

    def _begin_shutdown(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._deadline = time.monotonic() + self._options.shutdown_timeout + GRACE_S
        self._close_listeners()
        self._broadcast(StopProcess())
        self._kill_processes(*self._engines.starting_children)  # nothing runs there yet

    def _kill_processes(self, *children: ChildProcess) -> None:
        for child in children:
            self._killed.add(child)
            child.process.kill()

    def _clean_up(self) -> None:
        """Whatever happened: no process stays, nor the folder. The engine ends last."""
        for child in self._api_processes:
            child.stop(0.0 if child in self._live_api_processes() else GRACE_S)
        self._engines.stop()
        self._close_listeners()
        if self._options.uds is not None:
            Path(self._options.uds).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _signal_socket(self) -> Iterator[socket.socket]:
        """Signals arrive as bytes of a socket, and their numbers in _signals."""
        ear, mouth = socket.socketpair()
        ear.setblocking(False)
        mouth.setblocking(False)
        heard = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        before = {n: signal.signal(n, self._on_signal) for n in heard}
        fd = signal.set_wakeup_fd(mouth.fileno())
        try:
            yield ear
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            ear.close()
            mouth.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def _raise_open_files_limit() -> None:
    """A connection is a file, and the usual limit of 1,024 is for programs that have few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_LIMIT if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
