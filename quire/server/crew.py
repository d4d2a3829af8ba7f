"""An API process, as the first process sees it: whether its event loop still turns.

The loop beats on a page of its own, as the engine does (quire.engine.pulse), and the same watchdog
looks at it. Asking it over HTTP would ask a queue that may be long, and whichever process the
kernel gives the connection to.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import time
from collections.abc import Sequence
from typing import IO

from quire.engine import pulse, remains
from quire.engine.link import GRACE_S, Child, HasFileno, RunServer
from quire.engine.pulse import Pulse, Reader
from quire.engine.watch import STOPPED, Watch

log = logging.getLogger(__name__)

BEAT_S = 0.5
STOPPED_S = 5.0
"""One that a signal has stopped for so long is ended; its connections wait for that."""


class ApiChild(Child):
    """The process. Whoever made it calls stop() or, when it is gone, close()."""

    def __init__(
        self, sockets: Sequence[HasFileno], limit_s: float, start_s: float | None = None
    ) -> None:
        """limit_s: of silence, after which it is beyond hope. 0: any. start_s: what a start takes,
        if that is known.
        """
        self.page: IO[bytes] = open(pulse.page(), "r+b", buffering=0)  # noqa: SIM115 it is ours till close()
        self.stacks: IO[bytes] = open(os.memfd_create("quire-stacks"), "r+b", buffering=0)  # noqa: SIM115
        self._watch = Watch(
            Reader(self.page.fileno()).read, limit_s, stopped_s=min(STOPPED_S, limit_s)
        )
        self._watch.started_in(start_s)
        self._given_up = False
        self._began_at = time.monotonic()
        super().__init__("quire.server.processes", sockets=[*sockets, self.page, self.stacks])

    @property
    def age_s(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._began_at

    def look(self) -> str | None:
        """Why it should be ended, if it should: its stacks are in the log then. Said once."""
        why = None if self._given_up else self._watch.look(self.process.pid)
        if why is not None:
            self._given_up = True
            remains.show(self, f"an API process does not get on: {why}", asking=why != STOPPED)
        return why

    def bury(self) -> None:
        """Its process is gone: log the stacks that it wrote, if it died of a fault."""
        stacks = remains.left(self)
        if stacks.startswith("Fatal"):
            log.error("an API process died here:\n%s", stacks.rstrip())

    def stop(self, timeout: float = GRACE_S) -> int:
        """Have it end; kill it if it does not in time. Its exit status."""
        status = super().stop(timeout)
        self.close()
        return status

    def close(self) -> None:
        """Let go of what was shared with it. Harmless when called again."""
        self.link.close()
        self.page.close()
        self.stacks.close()


class Heart:
    """In the process itself: shows that it starts, and from turn() on that its loop turns."""

    def __init__(self, orders: RunServer) -> None:
        """Without a page nobody looks."""
        self._pulse = Pulse(pulse.page() if orders.beat is None else orders.beat)
        self._pulse.begin(os.getpid())
        if orders.stacks is not None:
            faulthandler.enable(orders.stacks)
            faulthandler.register(remains.STACKS, orders.stacks)

    def turn(self) -> None:
        """On the event loop that serves: beat from now on."""
        self._pulse.serve()
        self._beat(asyncio.get_running_loop())

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pulse.rest(0)
        loop.call_later(BEAT_S, self._beat, loop)
