"""Engine group: engines of one model, each with its restarter, watchdog and devices.

They are alike and independent: requests run on any of them (quire.engine.client.engine_pool). Other
nodes may have some (quire.engine.cluster.remote_engines). The group is ready when all have started,
and lives as long as one of them can be replaced.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from quire.config.options import Options
from quire.engine.cluster.ray_context import with_ray_context
from quire.engine.startup.early_start import early_rank_count
from quire.engine.supervise.engine_devices import engine_environments
from quire.engine.supervise.engine_restarter import EngineRestarter, RestartBudget
from quire.engine.supervise.process_launcher import (
    EngineChildProcess,
    EngineProcessHandle,
    describe_exit,
)
from quire.engine.supervise.process_pipe import (
    AnyControlMessage,
    ChildProcess,
    ClientGone,
    EngineDraining,
    EngineRestored,
    EngineStarted,
    EngineTerminated,
    EngineUnavailable,
    ModelLocated,
    RestartEngine,
)
from quire.engine.supervise.watchdog import Watchdog

if TYPE_CHECKING:
    from quire.engine.cluster.remote_engines import RemoteEngines


class EngineGroup:
    """Starts the engines, and others in their places. The caller reads their pipes."""

    def __init__(
        self,
        options: Options,
        cache: Path,
        *,
        log_level: str,
        log_style: str = "text",
        server: bool = True,
        clients: int | None = None,
        remote: RemoteEngines | None = None,
        listen_host: str | None = None,
        cluster_secret: str | None = None,
    ) -> None:
        """server: requests come over HTTP. clients: how many processes will connect to each engine,
        once; None: any number. remote: engines of other nodes, behind those of this one.

        listen_host: address at which engines listen for clients on other machines, which have the
        secret.
        """
        self._remote = remote
        self._remote_addresses: dict[int, str] = {}  # by engine, once it has started
        self._remote_unavailable: dict[int, EngineUnavailable] = {}
        self._remote_restarts: Counter[int] = Counter()
        options = self._options = with_ray_context(options)
        self._began_at = time.monotonic()
        self.started_at = self._began_at
        """When the last of the first engines was ready."""
        variables = engine_environments(options)
        self._nodes_listener: socket.socket | None = None
        if options.parallel.nnodes > 1:
            from quire.distributed.node_address import listen_for_nodes  # ZeroMQ

            self._nodes_listener = listen_for_nodes(options)  # it outlives each engine
        inherited = [] if self._nodes_listener is None else [self._nodes_listener]
        self._start_process = partial(
            EngineProcessHandle,
            options,
            log_level=log_level,
            log_style=log_style,
            server=server,
            clients=clients,
            listen_host=listen_host,
            cluster_secret=cluster_secret,
            nodes_fd=None if self._nodes_listener is None else self._nodes_listener.fileno(),
        )
        self._watchdogs = [Watchdog(options.health, cache, one, inherited) for one in variables]
        self._restarters: list[EngineRestarter] = []
        self._lost: set[int] = set()  # engines that are not replaced any longer
        self._draining: set[int] = set()

    def start(self) -> None:
        """Start all engines."""
        recovery, ranks = self._options.recovery, early_rank_count(self._options)
        for watchdog in self._watchdogs:
            budget = RestartBudget(recovery.max_engine_restarts, recovery.engine_restart_window)
            standby = recovery.engine_standby and recovery.max_engine_restarts > 0
            self._restarters.append(
                EngineRestarter(
                    partial(_start_engine, self._start_process, watchdog),
                    budget,
                    partial(watchdog.create_child, ranks) if standby else None,
                )
            )

    def __len__(self) -> int:
        return len(self._watchdogs) + len(self._remote_ranks)

    @property
    def _remote_ranks(self) -> range:
        return range(0) if self._remote is None else self._remote.ranks

    @property
    def folder(self) -> str:
        """The shared folder, kept until stop()."""
        return self._restarters[0].folder

    @property
    def addresses(self) -> list[str]:
        """Where the engines listen."""
        remote = [self._remote_addresses[rank] for rank in self._remote_ranks]
        return [one.address for one in self._restarters] + remote

    @property
    def heartbeat_files(self) -> list[IO[bytes]]:
        """The heartbeat page of each engine of this node."""
        return [one.heartbeat_file for one in self._watchdogs]

    @property
    def restart_counts(self) -> list[int]:
        """How many engines have replaced each of the first."""
        remote = [self._remote_restarts[rank] for rank in self._remote_ranks]
        return [one.restart_count for one in self._restarters] + remote

    @property
    def children(self) -> Iterator[EngineChildProcess]:
        """The process of each engine of this node."""
        return (one.engine.child for one in self._restarters)

    @property
    def all_started(self) -> EngineStarted | None:
        """What the first engine has reported, and all addresses, once all have started; None: not
        all have.
        """
        local = self._local_started
        if local is None or len(self._remote_addresses) < len(self._remote_ranks):
            return None
        return msgspec.structs.replace(local, addresses=tuple(self.addresses))

    @property
    def _local_started(self) -> EngineStarted | None:
        reported = [one.engine_started for one in self._restarters]
        return reported[0] if reported and all(reported) else None

    def owns(self, child: ChildProcess | RemoteEngines) -> bool:
        return child is self._remote or any(one is child for one in self.children)

    def _index(self, child: ChildProcess | RemoteEngines) -> int:
        return next(i for i, one in enumerate(self.children) if one is child)

    def handle(
        self, child: ChildProcess | RemoteEngines, message: AnyControlMessage
    ) -> AnyControlMessage | None:
        """Handle a message of an engine's process, or about remote engines. Returns the message for
        all clients.

        Raises the error of a first engine's start.
        """
        if child is self._remote:
            return self._handle_remote(message)
        index = self._index(child)
        restarter = self._restarters[index]
        first = isinstance(message, EngineStarted) and restarter.engine_started is None
        answer = restarter.handle(message)
        if first:
            self.started_at = time.monotonic()
            self._watchdogs[index].set_start_time(self.started_at - self._began_at)
            if self._remote is not None and self._local_started is not None:
                self._remote.set_config(self._local_started.config)
            return self.all_started
        if isinstance(answer, ModelLocated):
            return answer if not index else None
        return None if answer is None else _of_engine(answer, index)

    def _handle_remote(self, message: AnyControlMessage) -> AnyControlMessage | None:
        if isinstance(message, EngineDraining):
            self.set_draining(message)
        elif isinstance(message, EngineUnavailable):
            self._remote_unavailable[message.engine] = message
        elif isinstance(message, EngineRestored):
            first = message.engine not in self._remote_addresses
            self._remote_addresses[message.engine] = message.address
            self._remote_unavailable.pop(message.engine, None)
            self._draining.discard(message.engine)
            if first:
                self.started_at = time.monotonic()
                return self.all_started
            self._remote_restarts[message.engine] += 1
        return message if self.all_started is not None else None

    def on_exit(self, child: ChildProcess) -> tuple[AnyControlMessage, EngineChildProcess | None]:
        """An engine's process is gone. Returns the message for all clients, and its successor.

        None: there is none. The message is then that of the group if no engine is left.
        """
        index = self._index(child)
        restarter, watchdog = self._restarters[index], self._watchdogs[index]
        started = restarter.engine_started
        watchdog.record_death(
            restarter.engine.child,
            describe_exit(child.process.wait()),
            None if started is None else started.config,
        )
        answer = restarter.on_engine_exit()
        if isinstance(answer, EngineTerminated):
            self._lost.add(index)
            return _of_engine(answer, index), None
        return _of_engine(answer, index), restarter.engine.child

    @property
    def is_lost(self) -> bool:
        """Whether no engine is left, or one could not start."""
        if self.all_started is None:
            return True
        remote = len(self._remote_ranks) > len(self._remote_unavailable)
        return len(self._lost) == len(self._restarters) and not remote

    def current_state(self) -> list[AnyControlMessage]:
        """Return the messages that a client needs which starts now."""
        first = self._restarters[0]
        found: list[AnyControlMessage | None] = [first.model_located, self.all_started]
        for index, one in enumerate(self._restarters):
            if one.unavailable is not None:
                found.append(_of_engine(one.unavailable, index))
            elif index in self._lost:
                found.append(EngineTerminated(reason="it was not replaced", engine=index))
        found += self._remote_unavailable.values()
        found += [EngineDraining(engine=one, move_after_s=0.0) for one in self._draining]
        return [one for one in found if one is not None]

    def set_draining(self, message: EngineDraining) -> None:
        """An engine gets no new requests, or gets them again."""
        if message.move_after_s is None:
            self._draining.discard(message.engine)
        else:
            self._draining.add(message.engine)

    def remove_client(self, name: str) -> None:
        """The client of this name is gone."""
        message = ClientGone(client_name=name)
        for child in self.children:
            child.pipe.try_send(message)
        if self._remote is not None:
            self._remote.send(message)

    # -- liveness -------------------------------------------------------------------------------

    @property
    def check_interval_s(self) -> float | None:
        """How often to call check_liveness(). None: never."""
        return self._watchdogs[0].check_interval_s

    def check_liveness(self) -> Iterator[tuple[int, str]]:
        """Yield each engine that makes no progress, and why."""
        for index, (restarter, watchdog) in enumerate(zip(self._restarters, self._watchdogs)):
            if index not in self._lost and watchdog.check_interval_s is not None:
                why = watchdog.check(restarter.engine.child)
                if why is not None:
                    yield index, why

    def restart(self, engine: int, reason: str) -> None:
        """Kill an engine. Its successor continues, or the others."""
        if engine in self._remote_ranks:
            assert self._remote is not None
            self._remote.send(RestartEngine(reason=reason, engine=engine))
        elif engine not in self._lost:
            self._restarters[engine].restart(reason)

    # -- the end --------------------------------------------------------------------------------

    @property
    def starting_children(self) -> list[EngineChildProcess]:
        """Processes of engines that are not ready: they read no messages."""
        return [
            one.engine.child
            for one in self._restarters
            if one.engine_started is None or one.unavailable is not None
        ]

    def stop(self) -> None:
        """Stop all processes and nodes, and remove files. Harmless when called again."""
        if self._remote is not None:
            self._remote.stop()
            self._remote = None
        for restarter in self._restarters:
            restarter.stop()
        for watchdog in self._watchdogs:
            watchdog.close()
        if self._nodes_listener is not None:
            self._nodes_listener.close()


def _start_engine(
    start_process: Callable[..., EngineProcessHandle],
    watchdog: Watchdog,
    child: EngineChildProcess | None,
) -> EngineProcessHandle:
    return start_process(child=child or watchdog.create_child())


def _of_engine(message: AnyControlMessage, index: int) -> AnyControlMessage:
    """Return the message with the number of the engine that it is about."""
    assert isinstance(message, (EngineUnavailable, EngineRestored, EngineTerminated)), message
    return msgspec.structs.replace(message, engine=index)
