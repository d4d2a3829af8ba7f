"""Starts an engine's process, and ends it so that nothing is left behind.

Light: imports no torch, so that the process may be started before anything else is imported and
both get ready side by side.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import IO

from quire.config.options import Options
from quire.engine import pulse
from quire.engine.aboard import page, read
from quire.engine.link import GRACE_S, Any_, Built, Child, Failed, Found, RunEngine
from quire.engine.messages import error_of
from quire.errors import ConfigError, EngineDead

STOP_S = 10.0
"""Time for an engine to end its step and let go of its device."""
LONGEST = 80
"""Characters of a folder in which a socket can be."""


class EngineProcess:
    """An engine's process and the folder of its socket. Whoever made it calls stop()."""

    def __init__(
        self,
        options: Options,
        *,
        log_level: str,
        log_style: str = "text",
        server: bool = False,
        askers: int | None = None,
        child: EngineChild | None = None,
    ) -> None:
        """askers: how many processes will connect, once each; None: any number, at any time.

        child: a process that stands by for orders. None: one is started now.
        """
        self.child = child or EngineChild()
        self.folder = _private_folder()
        orders = RunEngine(
            options=dict(options.changed()),
            folder=self.folder,
            log_level=log_level,
            log_style=log_style,
            server=server,
            askers=askers,
            aboard=self.child.page.fileno(),
            pulse=self.child.pulse.fileno(),
            stacks=self.child.stacks.fileno(),
            ring=self.child.ring.fileno(),
        )
        try:
            self.child.link.send(orders)
        except TypeError as error:
            self.stop()
            raise ConfigError(
                f"an option cannot be sent to the engine's process: {error}"
            ) from None

    def found(self) -> Found:
        """Wait until the model is found. Raises what went wrong there: ConfigError, NoRoom ..."""
        word = self._next()
        assert isinstance(word, Found), word
        return word

    def built(self) -> Built:
        """Wait until it takes requests. Raises what went wrong there."""
        word = self._next()
        assert isinstance(word, Built), word
        return word

    def _next(self) -> Any_:
        word = self.child.link.receive()
        if isinstance(word, Failed):
            raise error_of(word.fault)
        if word is None:
            status = self.child.process.wait()
            raise EngineDead(f"the engine's process ended while it started: {ended(status)}")
        return word

    def stop(self, timeout: float = STOP_S) -> int:
        """End it; its exit status. Harmless when called again."""
        status = self.child.stop(timeout)
        shutil.rmtree(self.folder, ignore_errors=True)
        return status


class EngineChild(Child):
    """A process that imports what an engine needs, and waits for orders.

    What its death must not take with it is written to files that we have too.
    """

    def __init__(self, beat: int | None = None) -> None:
        """beat: the page of an engine before, for those who read it already."""
        self.page = page()
        self.pulse = _file(pulse.page() if beat is None else os.dup(beat))
        self.stacks = _file(os.memfd_create("quire-stacks"))
        self.ring = _file(os.memfd_create("quire-ring"))
        files = [self.page, self.pulse, self.stacks, self.ring]
        super().__init__("quire.engine.process", sockets=files)

    def aboard(self) -> list[str] | None:
        """Whom it ran last. None: it may be any."""
        return read(self.page)

    def stop(self, timeout: float = GRACE_S) -> int:
        """Have it end; kill it if it does not in time. Its exit status."""
        status = super().stop(timeout)
        for file in (self.page, self.pulse, self.stacks, self.ring):
            file.close()
        return status


def _file(descriptor: int) -> IO[bytes]:
    return open(descriptor, "r+b", buffering=0)


def _private_folder() -> str:
    """0700: nobody else may speak to the engine. Short: a unix socket's path has its limit."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="quire-", dir=usual if len(usual) <= LONGEST else "/tmp")


def ended(status: int) -> str:
    """An exit status in words."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
