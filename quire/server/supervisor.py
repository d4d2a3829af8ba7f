"""`quire serve` as a whole: one engine process, one or more API processes, and this one, which
starts them, hears signals, and sees to it that all end together and nothing stays behind.

It imports neither torch nor the server, so that the others are started at once and get ready side
by side. The one idea: it holds a link to each of them. A link that ends means that its process is
gone: another is started, as often as is allowed. When this process is gone, however it went,
theirs end and they go too.
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

from quire import env
from quire.config.options import Options
from quire.core.quarantine import Quarantine
from quire.engine.keeper import Keeper, Restarts
from quire.engine.link import (
    Any_,
    Built,
    Child,
    Condemned,
    Died,
    Failed,
    Left,
    Listening,
    Restart,
    RunServer,
    Stop,
)
from quire.engine.messages import error_of
from quire.engine.spawn import EngineChild, EngineProcess, ended
from quire.engine.watch import TICK_S
from quire.engine.watchdog import Watchdog
from quire.log import Lossy
from quire.server.crew import ApiChild
from quire.server.options import ServerOptions

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Beyond the time that requests have, for what ends to end; then it is killed."""
MANY_FILES = 65536


class Supervisor:
    """All processes of one server."""

    def __init__(
        self,
        options: Options,
        server_options: ServerOptions,
        listeners: list[socket.socket],
        *,
        log_level: str,
    ) -> None:
        self._engine_options = options
        self._options = server_options
        self._listeners = listeners
        self._log_level = log_level
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._stopping = False
        self._deadline: float | None = None
        self._status = 0
        self._killed: set[Child] = set()
        self._welcome: dict[Child, str] = {}
        self._welcomed = False
        self._keeper: Keeper | None = None
        self._watchdog = Watchdog(options.health, env.read().cache_dir)
        self._look_at = 0.0
        self._began_at = time.monotonic()
        self._api: list[ApiChild] = []
        self._api_start_s: float | None = None  # what the slowest of the first took
        self._quarantine = Quarantine()  # what any of them has put into its own
        self._names: list[str] = []  # of the API processes
        self._births = 0  # of API processes in place of others
        said = options.recovery
        self._said = said
        self._api_restarts = Restarts(said.max_engine_restarts, said.engine_restart_window)

    def run(self) -> int:
        """Until all has ended; the exit status. Raises what kept the server from starting."""
        _allow_many_files()
        with self._hearing_signals() as ear:
            self._selector.register(ear, selectors.EVENT_READ, None)
            try:
                self._start()
                while self._living():
                    self._turn(ear)
            finally:
                self._clean_up()
        return self._status

    def _start(self) -> None:
        """The engine first: it takes longest."""
        said = self._said
        restarts = Restarts(said.max_engine_restarts, said.engine_restart_window)
        make = self._watchdog.child
        standby = make if said.engine_standby and said.max_engine_restarts else None
        self._keeper = Keeper(self._start_engine, restarts, standby)
        self._watch(self._keeper.engine.child)
        for index in range(len(self._listeners)):
            self._names.append(f"api-{index}")
            self._api.append(self._start_api(self._keeper, index, 0))

    def _start_engine(self, child: EngineChild | None) -> EngineProcess:
        return EngineProcess(
            self._engine_options,
            log_level=self._log_level,
            log_style=self._options.log_format,
            server=True,
            askers=1 if len(self._listeners) == 1 and not self._said.max_engine_restarts else None,
            child=child or self._watchdog.child(),
        )

    def _start_api(self, keeper: Keeper, index: int, birth: int) -> ApiChild:
        listener = self._listeners[index]  # stays ours, too: a dead one's goes to the next
        page = self._watchdog.page
        limit_s = self._options.api_watchdog_seconds
        child = ApiChild([listener, page], limit_s, self._api_start_s)
        orders = RunServer(
            options=dataclasses.asdict(self._options),
            folder=keeper.folder,
            engine=keeper.engine.folder,
            name=self._names[index],
            index=index,
            count=self._options.api_server_count,
            birth=birth,
            restarts=keeper.restarts,
            pulse=page.fileno(),
            beat=child.page.fileno(),
            stacks=child.stacks.fileno(),
            condemned=tuple(self._quarantine.kept()),
            sockets=[listener.fileno()],
            log_level=self._log_level,
        )
        child.link.send(orders)
        self._watch(child)
        return child

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _watch(self, child: Child) -> None:
        self._selector.register(child.link.fileno(), selectors.EVENT_READ, child)

    def _living(self) -> list[ApiChild]:
        """API processes whose link has not ended."""
        watched = [key.data for key in self._selector.get_map().values()]
        return [child for child in self._api if child in watched]

    def _turn(self, ear: socket.socket) -> None:
        left = TICK_S if self._looks else None
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
        for key, _ in self._selector.select(left):
            if key.data is None:
                ear.recv(64)
                self._on_signals()
            else:
                self._hear(key.data)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            log.error("what runs did not end in time: it is killed")
            self._kill(*self._api)
            self._status = 1
        if not self._stopping and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + TICK_S
            self._look()

    def _look(self) -> None:
        """End whom nothing else will."""
        if self._keeper is not None and self._watchdog.period_s is not None:
            why = self._watchdog.look(self._keeper.engine.child)
            if why is not None:
                self.restart(why)
        for child in self._api:  # one that hangs gets its share of connections, and answers none
            if child.look() is not None:
                child.process.kill()

    @property
    def _looks(self) -> bool:
        return self._watchdog.period_s is not None or self._options.api_watchdog_seconds > 0

    def _hear(self, child: Child) -> None:
        word = child.link.receive()
        if word is None:
            self._selector.unregister(child.link.fileno())
            self._lost(child)
            return
        if self._is_engine(child):
            assert self._keeper is not None, "an engine without a keeper"
            if isinstance(word, Built) and self._keeper.built is None:
                self._watchdog.started_in(time.monotonic() - self._began_at)
            told = self._keeper.hear(word)
            if told is not None:
                self._tell_api(told)
        elif isinstance(word, Condemned):
            self._condemn(child, word)
        elif isinstance(word, Listening):
            self._listening(child, word.welcome)
        elif isinstance(word, Restart):
            self.restart(word.reason)
        elif isinstance(word, Failed) and not self._births:
            raise error_of(word.fault)
        if child.link.has_word:
            self._hear(child)

    def _listening(self, child: Child, welcome: str) -> None:
        self._welcome[child] = welcome
        if len(self._welcome) == len(self._api) and not self._welcomed:
            self._welcomed = True
            self._api_start_s = max(one.age_s for one in self._api)
            print(welcome, file=Lossy(sys.stdout), flush=True)  # what people wait for

    def _condemn(self, who: Child, word: Condemned) -> None:
        """All shall know, those included that are yet to be started."""
        self._quarantine.put(word.fingerprint)
        for child in self._api:
            if child is not who:
                child.link.offer(word)  # one that does not read hangs, and is soon ended

    def restart(self, reason: str) -> None:
        """End the engine at once, whatever it does, and start another: streams go on there."""
        if self._keeper is not None and not self._stopping:
            log.error("the engine is ended: %s", reason)
            self._keeper.restart(reason)

    def _tell_api(self, word: Any_) -> None:
        for child in self._api:
            child.link.send(word)

    # -- ends -----------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        """The first asks for an end, and a second Ctrl-C for one at once."""
        numbers, self._signals = self._signals, []
        if signal.SIGHUP in numbers:
            numbers = [one for one in numbers if one != signal.SIGHUP]
            for child in self._living():
                child.process.send_signal(signal.SIGHUP)
        if self._stopping and signal.SIGINT in numbers:
            self._kill(*self._api)
            self._status = 1
        elif numbers:
            self._end()

    def _is_engine(self, child: Child) -> bool:
        return self._keeper is not None and child is self._keeper.engine.child

    def _lost(self, child: Child) -> None:
        """A process is gone. That of itself is right only when all are ending."""
        status = child.process.wait()
        if self._stopping and (not status or child in self._killed):
            return
        if isinstance(child, ApiChild):
            why = self._lost_api(child, f"an API process ended: {ended(status)}")
        else:
            self._bury(ended(status))
            why = self._lost_engine(f"the engine's process ended: {ended(status)}")
        if why is None:
            return
        if not self._status:
            log.error("%s", why)
        self._status = 1
        self._end()

    def _bury(self, why: str) -> None:
        keeper = self._keeper
        if keeper is not None and not self._stopping:
            config = None if keeper.built is None else keeper.built.config
            self._watchdog.bury(keeper.engine.child, why, config)

    def _lost_engine(self, why: str) -> str | None:
        """Start another, if that may be; else why all is over."""
        assert self._keeper is not None, "an engine without a keeper"
        if self._stopping:
            return why
        told = self._keeper.lost()
        self._tell_api(told)
        if isinstance(told, Died):
            return told.why
        self._watch(self._keeper.engine.child)
        return None

    def _lost_api(self, child: ApiChild, why: str) -> str | None:
        """Start another in its place, if it has served."""
        keeper, index = self._keeper, self._api.index(child)
        child.bury()
        served = self._welcome.pop(child, None) is not None
        if keeper is None or self._stopping or not served:
            return why
        if not self._api_restarts.take():
            return why
        log.error("%s; its connections are lost, and another is being started", why)
        keeper.engine.child.link.send(Left(name=self._names[index]))
        child.close()
        self._births += 1
        self._names[index] = f"api-{index}.{self._births}"
        self._api[index] = self._start_api(keeper, index, self._births)
        for word in (keeper.found, keeper.built, keeper.away):
            if word is not None:
                self._api[index].link.send(word)
        return None

    def _end(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._deadline = time.monotonic() + self._options.shutdown_timeout + GRACE_S
        self._close_listeners()
        self._tell_api(Stop())
        keeper = self._keeper
        if keeper is not None and (keeper.built is None or keeper.away is not None):
            self._kill(keeper.engine.child)  # nothing runs there yet, and a start takes long

    def _kill(self, *children: Child) -> None:
        for child in children:
            self._killed.add(child)
            child.process.kill()

    def _clean_up(self) -> None:
        """Whatever happened: no process stays, nor the folder. The engine ends last."""
        for child in self._api:
            child.stop(0.0 if child in self._living() else GRACE_S)
        if self._keeper is not None:
            self._keeper.stop()
        self._watchdog.close()
        self._close_listeners()
        if self._options.uds is not None:
            Path(self._options.uds).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _hearing_signals(self) -> Iterator[socket.socket]:
        """Signals arrive as bytes of a socket, and their numbers in _signals."""
        ear, mouth = socket.socketpair()
        ear.setblocking(False)
        mouth.setblocking(False)
        heard = [signal.SIGINT, signal.SIGTERM]
        if self._options.api_key_file is not None:
            heard.append(signal.SIGHUP)  # read it again
        before = {n: signal.signal(n, self._note) for n in heard}
        fd = signal.set_wakeup_fd(mouth.fileno())
        try:
            yield ear
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            ear.close()
            mouth.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def _allow_many_files() -> None:
    """A connection is a file, and the usual limit of 1,024 is for programs that have few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
