"""Engine process: one thread reads messages, runs a step, and sends the outputs.

quire.engine.core.process_main starts it. It ends on StopProcess, or when its parent is
gone. While there are steps to make, the thread reads the socket between them; an idle thread sleeps
in it, and wakes once a second to send a heartbeat. No other thread of the process runs Python, so
no step waits for the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from quire.config.engine_config import EngineConfig
from quire.config.options import Options
from quire.config.vllm_environment import start_process
from quire.distributed.cluster_secret import ClusterSecret
from quire.engine import heartbeat_page, message_codec
from quire.engine.build import EngineCoreBundle, build_engine_core
from quire.engine.client.zmq_transport import configure_tcp, engine_address, tcp_address
from quire.engine.core import gc_control
from quire.engine.core.engine_rpc import EngineRpc
from quire.engine.core.running_list_shm import RunningListWriter
from quire.engine.core.step_observer import StepObserver
from quire.engine.heartbeat_page import HeartbeatWriter
from quire.engine.messages import (
    HEARTBEAT_INTERVAL_S,
    CallReply,
    EngineDeadMessage,
    Hello,
    OutputBatch,
    UtilityCall,
    WireError,
    error_to_wire,
)
from quire.engine.recording.flight_recorder import FlightRecorder, RecordRing
from quire.engine.startup.head_setup import JoinPort
from quire.engine.startup.startup_timer import StartupTimer
from quire.engine.supervise.crash_artifacts import STACK_DUMP_SIGNAL
from quire.engine.supervise.process_pipe import (
    ClientGone,
    EngineStarted,
    ModelLocated,
    ProcessFailed,
    ProcessPipe,
    RunEngine,
    StopProcess,
)
from quire.errors import QuireError, RequestError

log = logging.getLogger(__name__)

SOCKET_LINGER_MS = 1000
"""Seconds in which the last messages must be sent."""
GC_INTERVAL_S = 300.0
"""Garbage is collected when the engine is idle, but at least this often."""
UNBOUNDED_CALLS = frozenset(("start_profile", "stop_profile"))
"""Calls that may take any time: the watchdog waits for them."""


def run(pipe: ProcessPipe, orders: RunEngine, timer: StartupTimer) -> int:
    """Run one engine, as ordered over the pipe. Returns the exit status. timer: of its start."""
    if orders.stacks_fd is not None:
        faulthandler.enable(orders.stacks_fd)
        faulthandler.register(STACK_DUMP_SIGNAL, orders.stacks_fd)
    heartbeat = HeartbeatWriter(
        heartbeat_page.create_page() if orders.heartbeat_fd is None else orders.heartbeat_fd
    )
    heartbeat.mark_starting(os.getpid())
    start_process(level=orders.log_level, style=orders.log_style)  # type: ignore[arg-type]
    parent = ParentWatch(pipe, orders.folder)

    def found(config: EngineConfig, tokenizer: Path | None) -> None:
        pipe.send(
            ModelLocated(
                config=config, tokenizer_folder=None if tokenizer is None else str(tokenizer)
            )
        )

    try:
        options = Options.from_flat(orders.options)
        join_port = None
        if orders.nodes_fd is not None:  # waiting for other machines is no lack of progress
            join_port = JoinPort(orders.nodes_fd, lambda: heartbeat.mark_starting(os.getpid()))
        built = build_engine_core(
            options, found, server=orders.server, timer=timer, join_port=join_port
        )
    except QuireError as error:
        pipe.send(ProcessFailed(error=error_to_wire(error)))
        return 1
    rpc = EngineRpc(built.engine, built.param_checks, built.adapters)
    if orders.running_list_fd is not None:
        built.engine.set_running_callback(RunningListWriter(orders.running_list_fd).write)
    server = EngineCoreProcess(
        rpc,
        orders.folder,
        parent,
        clients=orders.expected_clients,
        heartbeat=heartbeat,
        probe_interval_s=built.config.health.canary_s,
        observers=_build_recorders(orders, built),
        listen_host=orders.listen_host,
        secret=None
        if orders.cluster_secret is None
        else ClusterSecret(orders.cluster_secret.encode()),
    )
    gc_control.disable_full_gc()
    server.start_serving()
    started = EngineStarted(
        config=built.config, startup_seconds=built.seconds, addresses=(server.address,)
    )
    pipe.send(started)
    status = server.run()
    if server.death_reason is not None:
        pipe.send(ProcessFailed(error=WireError("EngineDead", server.death_reason)))
    if server.death_reason is not None or built.config.parallel.ranks > 1:
        logging.shutdown()
        os._exit(status)  # a regular exit may hang in a broken device, or in NCCL's destructors
    return status


def _build_recorders(orders: RunEngine, built: EngineCoreBundle) -> Iterator[StepObserver]:
    """The flight recorder, if it is on."""
    health, engine = built.config.health, built.engine
    if health.recorder and orders.recorder_fd is not None:
        ring = RecordRing(orders.recorder_fd, health.recorder_bytes)
        yield FlightRecorder(ring, lambda: engine.available_blocks, engine.extend_keys)


class ParentWatch:
    """Reads the pipe to the parent process in a thread, as a start and a step may take long.

    Each message makes `wakeup_socket` readable. Once the parent is gone this process removes its
    folder and exits at once.
    """

    def __init__(self, pipe: ProcessPipe, folder: str) -> None:
        self.wakeup_socket, self._wakeup_sender = socket.socketpair()
        self.wakeup_socket.setblocking(False)
        self.stop_requested = False
        self.gone_clients: deque[str] = deque()
        """Names of clients that are gone."""
        self._pipe = pipe
        self._folder = folder
        threading.Thread(target=self._watch, name="quire-starter", daemon=True).start()

    def clear(self) -> None:
        """Make `wakeup_socket` unreadable."""
        with suppress(BlockingIOError):
            self.wakeup_socket.recv(1 << 16)

    def _watch(self) -> None:
        while (word := self._pipe.receive()) is not None:
            if isinstance(word, StopProcess):
                self.stop_requested = True
                self._wakeup_sender.send(b"!")
            elif isinstance(word, ClientGone):
                self.gone_clients.append(word.client_name)
                self._wakeup_sender.send(b"!")
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)


class WakeupPipe:
    """Wakes the thread that polls `read_end`. Any thread may call wake()."""

    def __init__(self) -> None:
        self.read_end, self._write_end = socket.socketpair()
        self.read_end.setblocking(False)
        self._write_end.setblocking(False)

    def wake(self) -> None:
        """Make `read_end` readable."""
        with suppress(BlockingIOError):  # it is readable already
            self._write_end.send(b"!")

    def clear(self) -> None:
        """Make `read_end` unreadable."""
        with suppress(BlockingIOError):
            self.read_end.recv(1 << 16)


class EngineCoreProcess:
    """Serves an EngineRpc at a ZeroMQ ROUTER socket."""

    def __init__(
        self,
        rpc: EngineRpc,
        folder: str,
        parent: ParentWatch,
        *,
        clients: int | None = None,
        heartbeat: HeartbeatWriter | None = None,
        probe_interval_s: float = 0.0,
        observers: Iterable[StepObserver] = (),
        listen_host: str | None = None,
        secret: ClusterSecret | None = None,
    ) -> None:
        """probe_interval_s: idle seconds before a health probe step, and between two. 0: none.

        listen_host: address to listen at for clients that have the secret; None: in the folder.
        """
        self._heartbeat = heartbeat or HeartbeatWriter(heartbeat_page.create_page())
        self._probe_interval_s = probe_interval_s
        self._probe_due = 0.0
        self._rpc = rpc
        self._folder = folder
        self._parent = parent
        self._expected_clients = clients
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # unlimited: a full queue would drop messages
        self._socket.setsockopt(zmq.LINGER, SOCKET_LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, message_codec.MAX_MESSAGE_BYTES)
        self._authenticator = None if secret is None else secret.accept_clients(self._context)
        if secret is not None:
            secret.secure_server(self._socket)
        if listen_host is None:
            self._socket.bind(engine_address(folder))
        else:
            address = tcp_address(listen_host, "*")
            configure_tcp(self._socket, address)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client comes again by its name
            self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it listens."""
        self._wakeup = WakeupPipe()
        rpc.engine.set_ready_callback(self._wakeup.wake)
        rpc.engine.set_observers(self._heartbeat, *observers)
        self._heartbeat_due = 0.0
        self.death_reason: str | None = None
        """The error that ended it."""
        self._was_busy = True  # since it was last idle
        self._gc_due = time.monotonic() + GC_INTERVAL_S

    def start_serving(self) -> None:
        """Accept requests from now on. Raises the error of the device, if it has one."""
        if self._probe_interval_s:
            self._run_health_probe()
        self._heartbeat.mark_serving()

    def run(self) -> int:
        """Serve until StopProcess. Returns the exit status."""
        status = 0
        try:
            while not self._parent.stop_requested:
                self.run_once()
            self._heartbeat.mark_ended()
            self._rpc.engine.shutdown()
        except Exception as error:
            log.exception("the engine died")
            self._heartbeat.mark_ended()
            self.death_reason = f"the engine died: {type(error).__name__}: {error}"
            self._broadcast(EngineDeadMessage(self.death_reason))
            status = 1
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        return status

    def run_once(self) -> None:
        """Read messages, run a step if there is one, send the outputs."""
        self._wait()
        self._read_inbox()
        while self._parent.gone_clients:
            self._rpc.remove_client(self._parent.gone_clients.popleft().encode())
        rpc = self._rpc
        self._heartbeat.mark_iteration(working=not rpc.idle, requests=rpc.num_requests)
        for sender, batch in rpc.run_step():
            self._send(sender, batch)
        self._send_heartbeat()

    def _wait(self) -> None:
        """If idle, sleep until there is work or a heartbeat is due."""
        if not self._rpc.idle:
            self._was_busy = True
            return
        self._heartbeat.mark_idle(self._rpc.is_sleeping)
        now = time.monotonic()
        if self._was_busy:
            self._probe_due = now + self._probe_interval_s
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._parent.wakeup_socket, zmq.POLLIN)
        poller.register(self._wakeup.read_end, zmq.POLLIN)
        left = max(self._heartbeat_due - now, 0.0)
        if not poller.poll(int(left * 1000) + 1):
            self._on_idle()
        self._wakeup.clear()
        self._parent.clear()

    def _on_idle(self) -> None:
        """Idle for a heartbeat interval: collect garbage, or probe the device."""
        if self._was_busy:
            self._was_busy = False
            self._collect_garbage()
        elif self._probe_interval_s and time.monotonic() >= self._probe_due and self._rpc.empty:
            self._run_health_probe()

    def _run_health_probe(self) -> None:
        """Compute a token of a dummy request. Raises the error of the step: the engine is dead
        then."""
        self._heartbeat.mark_probe(True)
        try:
            if not self._rpc.engine.health_probe_step():
                log.debug("health probe step skipped: no free block or slot")
        finally:
            self._heartbeat.mark_probe(False)
        self._probe_due = time.monotonic() + self._probe_interval_s

    def _read_inbox(self) -> None:
        """Handle the messages since the last step."""
        while True:
            try:
                sender, *data = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._handle_message(sender.bytes, [one.buffer for one in data])

    def _handle_message(self, sender: bytes, frames: Sequence[bytes | memoryview]) -> None:
        try:
            message = message_codec.decode_to_engine(frames)
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("cannot decode a message of client %.60r: %s", sender, error)
            number = message_codec.call_id_of(frames[0]) if frames else None
            if number is not None:
                fault = error_to_wire(
                    RequestError(f"the engine cannot decode the request: {error}")
                )
                self._send(sender, OutputBatch([], [CallReply(number, error=fault)]))
            return
        unbounded = isinstance(message, UtilityCall) and message.method in UNBOUNDED_CALLS
        if unbounded:
            self._heartbeat.mark_unbounded(True)
        answer = self._rpc.handle(sender, message)
        if unbounded:
            self._heartbeat.mark_unbounded(False)
        if answer is not None:
            self._send(sender, answer)
        if isinstance(message, Hello):
            self._unlink_socket()

    def _unlink_socket(self) -> None:
        """Once all expected clients are connected, remove the socket's file: no other can connect,
        and no crash leaves it behind. A single client needs no folder either.
        """
        if (
            self._expected_clients is not None
            and len(self._rpc.client_ids()) >= self._expected_clients
        ):
            (Path(self._folder) / "engine").unlink(missing_ok=True)
            if self._expected_clients == 1:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, sender: bytes, message: OutputBatch | object) -> None:
        self._socket.send_multipart((sender, message_codec.encode(message)))  # type: ignore[arg-type]

    def _broadcast(self, message: object) -> None:
        for sender in self._rpc.client_ids():
            self._send(sender, message)

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        if now >= self._heartbeat_due:
            self._heartbeat_due = now + HEARTBEAT_INTERVAL_S
            self._broadcast(self._rpc.heartbeat())
            if now >= self._gc_due:
                self._collect_garbage()  # it was never idle

    def _collect_garbage(self) -> None:
        gc_control.collect_garbage()
        self._gc_due = time.monotonic() + GC_INTERVAL_S
