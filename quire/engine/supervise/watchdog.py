"""Watchdog: checks an engine's heartbeat, logs its stacks when it hangs, and saves its recording.

The parent process of engines has one. quire.engine.supervise.liveness decides whether an engine
hangs; quire.engine.supervise.engine_restarter replaces it. The watchdog sends the engine nothing,
so a hanging engine cannot block it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
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
from quire.engine.supervise.process_pipe import HasFileno

log = logging.getLogger(__name__)

RECORDING_WRITE_S = 10.0
"""How long close() waits for a recording to be written."""


class Watchdog:
    """Watches one engine after the other. The caller must call close()."""

    def __init__(
        self,
        options: HealthOptions,
        cache: Path,
        variables: Mapping[str, str] | None = None,
        inherited: Sequence[HasFileno] = (),
    ) -> None:
        """cache: parent of the folder for recordings, if the options name none.

        variables: of the engines' environment, beside those of this process. inherited: files that
        the engines get.
        """
        self._inherited = inherited
        self._variables = dict(variables or {})
        folder = options.flight_recorder_dir
        self._folder = cache / "recordings" if folder is None else Path(folder)
        self._recording_enabled = options.flight_recorder
        self._writer_threads: list[threading.Thread] = []
        self._last_reason: str | None = None  # of check()
        self.heartbeat_file: IO[bytes] = open(heartbeat_page.create_page(), "r+b", buffering=0)  # noqa: SIM115 handed out
        """The heartbeat page of all engines."""
        self._read_heartbeat = HeartbeatReader(self.heartbeat_file.fileno()).read
        self._monitor = LivenessMonitor(self._read_heartbeat, options.watchdog_seconds)

    @property
    def check_interval_s(self) -> float | None:
        """How often to call check(). None: never."""
        return CHECK_INTERVAL_S if self._monitor.is_enabled else None

    def create_child(self, ranks: int = 0) -> EngineChildProcess:
        """Start a process for an engine, which is watched. ranks: as for EngineChildProcess."""
        page = self.heartbeat_file.fileno()
        return EngineChildProcess(page, self._variables, self._inherited, ranks)

    def set_start_time(self, seconds: float) -> None:
        """The first engine has started in this time: the limit of others is a multiple of it."""
        self._monitor.set_start_time(seconds)

    def check(self, child: EngineChildProcess) -> str | None:
        """Return why this engine should be killed, and log its stacks then. None: it makes
        progress."""
        why = self._monitor.check(child.process.pid)
        if why is None:
            return None
        self._last_reason = why
        crash_artifacts.log_thread_stacks(
            child, f"the engine makes no progress: {why}", asking=why != PROCESS_STOPPED
        )
        return why

    def record_death(
        self, child: EngineChildProcess, why: str, config: EngineConfig | None
    ) -> None:
        """Log where a process died, and save its recording. config: None if it never started."""
        why, self._last_reason = self._last_reason or why, None
        stacks = crash_artifacts.read_crash_stacks(child)
        if stacks.startswith("Fatal"):
            log.error("the engine died (%s). Its stacks:\n%s", why, stacks.rstrip())
        if config is None or not self._recording_enabled:
            return
        ring, beat = os.dup(child.recorder_file.fileno()), self._read_heartbeat()

        def save() -> None:
            try:
                contents = flight_recorder.read_ring(ring)
                if contents is not None:
                    where = recording_file.write_recording(
                        self._folder, contents, config, why=why, beat=beat, stacks=stacks
                    )
                    log.error("the last steps of the engine are in %s: see `quire replay`", where)
            except OSError as error:
                log.error("cannot save the last steps of the engine: %s", error)  # noqa: TRY400 no trace
            finally:
                os.close(ring)

        self._writer_threads = [one for one in self._writer_threads if one.is_alive()]
        self._writer_threads.append(threading.Thread(target=save, name="quire-recording"))
        self._writer_threads[-1].start()

    def close(self) -> None:
        """Wait for recordings. Harmless when called again."""
        for one in self._writer_threads:
            one.join(RECORDING_WRITE_S)
        self.heartbeat_file.close()
