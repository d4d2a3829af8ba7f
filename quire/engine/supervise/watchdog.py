"""Whoever starts engines has one: it looks at the engine now and then, says when it is beyond hope,
and keeps what a dead one leaves.

Not here: what tells an engine that hangs (quire.engine.supervise.liveness), and what becomes of it
then
(quire.engine.supervise.engine_restarter). It asks the engine nothing, so nothing that the engine
does can keep it.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import IO

from quire.config.engine_config import EngineConfig
from quire.config.options import HealthOptions
from quire.engine import heartbeat_page
from quire.engine.heartbeat_page import HeartbeatReader
from quire.engine.recording import flight_recorder, recording_file
from quire.engine.supervise import crash_artifacts
from quire.engine.supervise.liveness import CHECK_INTERVAL_S, PROCESS_STOPPED, LivenessMonitor
from quire.engine.supervise.process_launcher import EngineChildProcess

log = logging.getLogger(__name__)

RECORDING_WRITE_S = 10.0
"""At the end there is so much time for a recording to be written."""


class Watchdog:
    """Over one engine after the other. Whoever made it calls close()."""

    def __init__(self, said: HealthOptions, cache: Path) -> None:
        """cache: where the folder for recordings is, if none was named."""
        named = said.flight_recorder_dir
        self._folder = cache / "recordings" if named is None else Path(named)
        self._recording_enabled = said.flight_recorder
        self._writer_threads: list[threading.Thread] = []
        self._last_reason: str | None = None  # what it said last
        self.heartbeat_file: IO[bytes] = open(heartbeat_page.create_page(), "r+b", buffering=0)  # noqa: SIM115 handed out
        """What they beat on."""
        self._read_heartbeat = HeartbeatReader(self.heartbeat_file.fileno()).read
        self._monitor = LivenessMonitor(self._read_heartbeat, said.watchdog_seconds)

    @property
    def check_interval_s(self) -> float | None:
        """How often to look. None: never."""
        return CHECK_INTERVAL_S if self._monitor.is_enabled else None

    def create_child(self) -> EngineChildProcess:
        """A process for an engine, which this one will watch."""
        return EngineChildProcess(self.heartbeat_file.fileno())

    def set_start_time(self, seconds: float) -> None:
        """The first engine is there: others may take some times as long."""
        self._monitor.set_start_time(seconds)

    def check(self, child: EngineChildProcess) -> str | None:
        """Why this engine should be ended, if it should: its stacks are in the log then."""
        why = self._monitor.check(child.process.pid)
        if why is None:
            return None
        self._last_reason = why
        crash_artifacts.log_thread_stacks(
            child, f"the engine does not get on: {why}", asking=why != PROCESS_STOPPED
        )
        return why

    def record_death(
        self, child: EngineChildProcess, why: str, config: EngineConfig | None
    ) -> None:
        """Its process is gone: say what it left, and keep that. config: None, if it never began."""
        why, self._last_reason = self._last_reason or why, None
        stacks = crash_artifacts.read_crash_stacks(child)
        if stacks.startswith("Fatal"):
            log.error("the engine died (%s) here:\n%s", why, stacks.rstrip())
        if config is None or not self._recording_enabled:
            return
        ring, beat = os.dup(child.recorder_file.fileno()), self._read_heartbeat()

        def keep() -> None:
            try:
                taken = flight_recorder.read_ring(ring)
                if taken is not None:
                    where = recording_file.write_recording(
                        self._folder, taken, config, why=why, beat=beat, stacks=stacks
                    )
                    log.error("its last steps are in %s: see `quire replay`", where)
            except OSError as error:
                log.error("its last steps cannot be kept: %s", error)  # noqa: TRY400 no trace
            finally:
                os.close(ring)

        self._writer_threads = [one for one in self._writer_threads if one.is_alive()]
        self._writer_threads.append(threading.Thread(target=keep, name="quire-recording"))
        self._writer_threads[-1].start()

    def close(self) -> None:
        """Harmless when called again."""
        for one in self._writer_threads:
            one.join(RECORDING_WRITE_S)
        self.heartbeat_file.close()
