"""Whoever starts engines has one: it looks at the engine now and then, says when it is beyond hope,
and keeps what a dead one leaves.

Not here: what tells an engine that hangs (quire.engine.watch), and what becomes of it then
(quire.engine.keeper). It asks the engine nothing, so nothing that the engine does can keep it.
"""

from __future__ import annotations

import logging
from typing import IO

from quire.config.options import HealthOptions
from quire.engine import pulse, remains
from quire.engine.pulse import Reader
from quire.engine.spawn import EngineChild
from quire.engine.watch import STOPPED, TICK_S, Watch

log = logging.getLogger(__name__)


class Watchdog:
    """Over one engine after the other. Whoever made it calls close()."""

    def __init__(self, said: HealthOptions) -> None:
        self.page: IO[bytes] = open(pulse.page(), "r+b", buffering=0)  # noqa: SIM115 handed out
        """What they beat on."""
        self._watch = Watch(Reader(self.page.fileno()).read, said.watchdog_seconds)

    @property
    def period_s(self) -> float | None:
        """How often to look. None: never."""
        return TICK_S if self._watch.on else None

    def child(self) -> EngineChild:
        """A process for an engine, which this one will watch."""
        return EngineChild(self.page.fileno())

    def started_in(self, seconds: float) -> None:
        """The first engine is there: others may take some times as long."""
        self._watch.started_in(seconds)

    def look(self, child: EngineChild) -> str | None:
        """Why this engine should be ended, if it should: its stacks are in the log then."""
        why = self._watch.look(child.process.pid)
        if why is None:
            return None
        pid = child.process.pid
        log.error("the engine does not get on: %s. Its threads:\n%s", why, remains.tasks(pid))
        stacks = "" if why == STOPPED else remains.ask(child)
        if stacks:
            log.error("where they are:\n%s", stacks.rstrip())
        return why

    def bury(self, child: EngineChild, why: str) -> None:
        """Its process is gone: say what it left."""
        stacks = remains.left(child)
        if stacks.startswith("Fatal"):
            log.error("the engine died (%s) here:\n%s", why, stacks.rstrip())

    def close(self) -> None:
        self.page.close()
