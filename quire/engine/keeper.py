"""Keeps an engine: when its process is gone, another is started, as often as is allowed.

Not here: who hears the links (quire.server.supervisor; the thread below for who has no supervisor),
and what becomes of requests (quire.engine.client). The one idea: whoever asks an engine is told of
three things only: it is away, it is back, it is dead.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable

from quire.engine.link import (
    Any_,
    Away,
    Back,
    Built,
    Died,
    Failed,
    Found,
    Link,
    Restart,
    Stop,
)
from quire.engine.messages import error_of
from quire.engine.spawn import STOP_S, EngineChild, EngineProcess, ended
from quire.engine.watchdog import Watchdog

log = logging.getLogger(__name__)


class Restarts:
    """How often something may be started anew: `most` times within a window."""

    def __init__(
        self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._taken: deque[float] = deque()

    def take(self) -> bool:
        """Count one, if it may be."""
        now = self._clock()
        while self._taken and now - self._taken[0] >= self._window_s:
            self._taken.popleft()
        if len(self._taken) >= self._most:
            return False
        self._taken.append(now)
        return True


class Keeper:
    """The engine that there is, or that is being started. Whoever made it calls stop()."""

    def __init__(
        self,
        start: Callable[[EngineChild | None], EngineProcess],
        restarts: Restarts,
        stand_by: Callable[[], EngineChild] | None = None,
    ) -> None:
        """stand_by: makes a process that can be given to start(). None: nobody stands by."""
        self._start = start
        self._stand_by = stand_by
        self._next: EngineChild | None = None
        self._restarts = restarts
        self._began_at = time.monotonic()
        self._took_s = 0.0  # the start before
        self._why: str | None = None  # what is known of the end of the one that there is
        self._spent: list[EngineProcess] = []
        self.engine = start(None)
        self.folder = self.engine.folder
        """Of the first one: it stays until stop(), for those who share it."""
        self.restarts = 0
        """How many have taken over."""
        self.found: Found | None = None
        self.built: Built | None = None
        self.away: Away | None = None
        """Told last, if the engine that there is takes no requests yet."""

    def hear(self, word: Any_) -> Any_ | None:
        """Take in a word of the engine's process; what who asks it is to be told.

        Raises what kept the first one from starting.
        """
        if isinstance(word, Failed):
            if self.built is None:
                raise error_of(word.fault)
            self._why = word.fault.message
        elif isinstance(word, Restart):
            self.restart(word.reason)
        elif isinstance(word, Found) and self.found is None:
            self.found = word
            return word
        elif isinstance(word, Built):
            return self._is_built(word)
        return None

    def _is_built(self, word: Built) -> Any_:
        self._took_s = time.monotonic() - self._began_at
        if self._stand_by is not None:
            self._next = self._stand_by()
        if self.built is None:
            self.built = word
            return word
        self.away = None
        self.restarts += 1
        log.warning("another engine is there after %.1f s", self._took_s)
        return Back(folder=self.engine.folder)

    def restart(self, reason: str) -> None:
        """End the engine at once, whatever it does; lost() is to follow."""
        self._why = reason
        self.engine.child.process.kill()

    def lost(self) -> Away | Died:
        """The engine's process is gone: start another, if that may be."""
        status = self.engine.child.process.wait()
        why = self._why or f"the engine's process ended: {ended(status)}"
        if self.built is None or not self._restarts.take():
            return Died(why=why)
        log.error("%s; another is being started", why)
        aboard = self.engine.child.aboard() if self.away is None else []
        self._spend()
        self._why = None
        self._began_at = time.monotonic()
        try:
            self.engine = self._start(self._who_stands_by())
        except OSError as error:
            return Died(why=f"{why}; and another cannot be started: {error}")
        self.away = Away(why=why, expected_s=self._took_s, aboard=aboard)
        return self.away

    def _who_stands_by(self) -> EngineChild | None:
        child, self._next = self._next, None
        return child if child is not None and child.process.poll() is None else None

    def _spend(self) -> None:
        """Clear up after the one that is gone, but for the folder that others share."""
        if self.engine.folder == self.folder:
            self._spent.append(self.engine)
        else:
            self.engine.stop(0.0)

    def stop(self, timeout: float | None = None) -> None:
        """End it, and leave nothing behind. Harmless when called again."""
        if timeout is None:  # one that starts would not listen
            timeout = STOP_S if self.built is not None and self.away is None else 0.0
        for one in (self.engine, *self._spent):
            one.stop(timeout)
        if self._next is not None:
            self._next.stop(0.0)


class Tended:
    """A thread that hears an engine's link, for who has no supervisor; it tells over `link`."""

    def __init__(self, keeper: Keeper, watchdog: Watchdog | None = None) -> None:
        """The engine must have been started, and its first words heard. watchdog: looks at it."""
        self._keeper = keeper
        self._watchdog = watchdog
        self.link, theirs = Link.pair()
        self._mouth = Link(theirs)
        self._thread = threading.Thread(target=self._run, name="quire-keeper", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> str:
        """Where the engine's socket is, or will be."""
        return self._keeper.engine.folder

    def stop(self) -> None:
        """End the engine."""
        self.link.send(Stop())
        self._thread.join()
        self._keeper.stop()
        if self._watchdog is not None:
            self._watchdog.close()
        self.link.close()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._mouth.close()

    def _turn(self) -> bool:
        """Wait for words and hear them. False: it is over."""
        link = self._keeper.engine.child.link
        with selectors.DefaultSelector() as both:
            both.register(self._mouth.fileno(), selectors.EVENT_READ, self._obey)
            both.register(link.fileno(), selectors.EVENT_READ, self._hear)
            dog = self._watchdog
            heard = [key.data() for key, _ in both.select(None if dog is None else dog.period_s)]
        if dog is not None and all(heard):
            why = dog.look(self._keeper.engine.child)
            if why is not None:
                self._keeper.restart(why)
        return all(heard)

    def _obey(self) -> bool:
        word = self._mouth.receive()
        if isinstance(word, Restart):
            self._keeper.restart(word.reason)
        return isinstance(word, Restart)

    def _bury(self) -> None:
        child, built = self._keeper.engine.child, self._keeper.built
        if self._watchdog is not None and built is not None:
            self._watchdog.bury(child, ended(child.process.wait()), built.config)

    def _hear(self) -> bool:
        link = self._keeper.engine.child.link
        word = link.receive()
        if word is None:
            self._bury()
        told = self._keeper.lost() if word is None else self._keeper.hear(word)
        if told is not None:
            self._mouth.send(told)
        if word is not None and link.has_word:
            return self._hear()
        return not isinstance(told, Died)
