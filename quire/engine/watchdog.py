"""Whoever starts engines has one: it looks at the engine now and then, says when it is beyond hope,
and keeps what a dead one leaves.

Not here: what tells an engine that hangs (quire.engine.watch), and what becomes of it then
(quire.engine.keeper). It asks the engine nothing, so nothing that the engine does can keep it.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import IO

from quire.config.config import EngineConfig
from quire.config.options import HealthOptions
from quire.engine import bundle, pulse, recorder, remains
from quire.engine.pulse import Reader
from quire.engine.spawn import EngineChild
from quire.engine.watch import STOPPED, TICK_S, Watch

log = logging.getLogger(__name__)

WRITE_S = 10.0
"""At the end there is so much time for a recording to be written."""


class Watchdog:
    """Over one engine after the other. Whoever made it calls close()."""

    def __init__(self, said: HealthOptions, cache: Path) -> None:
        """cache: where the folder for recordings is, if none was named."""
        named = said.flight_recorder_dir
        self._folder = cache / "recordings" if named is None else Path(named)
        self._records = said.flight_recorder
        self._writing: list[threading.Thread] = []
        self._why: str | None = None  # what it said last
        self.page: IO[bytes] = open(pulse.page(), "r+b", buffering=0)  # noqa: SIM115 handed out
        """What they beat on."""
        self._read = Reader(self.page.fileno()).read
        self._watch = Watch(self._read, said.watchdog_seconds)

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
        self._why = why
        remains.show(child, f"the engine does not get on: {why}", asking=why != STOPPED)
        return why

    def bury(self, child: EngineChild, why: str, config: EngineConfig | None) -> None:
        """Its process is gone: say what it left, and keep that. config: None, if it never began."""
        why, self._why = self._why or why, None
        stacks = remains.left(child)
        if stacks.startswith("Fatal"):
            log.error("the engine died (%s) here:\n%s", why, stacks.rstrip())
        if config is None or not self._records:
            return
        ring, beat = os.dup(child.ring.fileno()), self._read()

        def keep() -> None:
            try:
                taken = recorder.read(ring)
                if taken is not None:
                    where = bundle.write(
                        self._folder, taken, config, why=why, beat=beat, stacks=stacks
                    )
                    log.error("its last steps are in %s: see `quire replay`", where)
            except OSError as error:
                log.error("its last steps cannot be kept: %s", error)  # noqa: TRY400 no trace
            finally:
                os.close(ring)

        self._writing = [one for one in self._writing if one.is_alive()]
        self._writing.append(threading.Thread(target=keep, name="quire-recording"))
        self._writing[-1].start()

    def close(self) -> None:
        """Harmless when called again."""
        for one in self._writing:
            one.join(WRITE_S)
        self.page.close()
