"""Liveness: decides from the heartbeat page whether an engine makes progress.

Readiness: would a request that arrives now be computed? If not, traffic should go to other servers
for a while, so the limits are short. Liveness: will the engine ever make progress? If not, it is
killed, so the limits are long, and only time counts in which the watchdog ran and the process did
not wait for a processor: a suspended or overloaded machine is no reason to kill an engine.

An API process has a heartbeat page for its event loop (quire.server.process.api_process_monitor),
which is checked in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quire.engine.heartbeat_page import EnginePhase, Heartbeat
from quire.platform.processes import process_state

READY_SILENCE_S = 3.0
"""A ready engine may be silent for so long, beyond the expected time of its step."""
READY_STEP_FACTOR = 3
"""In a ready engine, a step may take so many times the expected time."""
ALIVE_STEP_FACTOR = 10
"""In a live engine, a step may take so many times the expected time."""
MAX_STOPPED_S = 2.0
"""A process that was stopped by a signal for so long is not expected to continue."""
CHECK_INTERVAL_S = 0.5
"""How often the watchdog checks."""
START_TIME_FACTOR = 10
"""A restart may take so many times what the first start took."""
PROCESS_STOPPED = "its process is stopped"


class Unhealthy(NamedTuple):
    """Why an engine would not compute a request. code: for programs."""

    code: str
    message: str


def check_readiness(beat: Heartbeat, now: int, state: str | None = None) -> Unhealthy | None:
    """Why a request that arrives now would not be computed. state: process_state(beat.pid)."""
    if beat.phase == EnginePhase.STARTING:
        return Unhealthy(
            "starting", f"the engine is starting, for {_seconds(now - beat.beat_at)} s so far"
        )
    if beat.phase != EnginePhase.SERVING or (state is not None and state in "XZ"):
        return Unhealthy("gone", "there is no engine")
    if state is not None and state in "Tt":
        return Unhealthy("stopped", "the engine's process is stopped")
    if beat.unbounded_since:
        return Unhealthy(
            "occupied", f"the engine writes a profile, {_for_seconds(now - beat.unbounded_since)}"
        )
    silent = now - max(beat.progress_at, 0)
    if not beat.working:
        if silent > READY_SILENCE_S * 1e9:
            return Unhealthy("silent", f"the engine has sent no heartbeat, {_for_seconds(silent)}")
        return None
    if silent > READY_SILENCE_S * 1e9 + READY_STEP_FACTOR * beat.expected_ns:
        return Unhealthy(
            "stalled", f"the engine has work and makes no progress, {_for_seconds(silent)}"
        )
    return None


def runqueue_wait_ns(pid: int) -> int:
    """How long the main thread of a process has waited for a processor; 0 if not counted."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.1f}"


def _for_seconds(ns: int) -> str:
    return f"for {_seconds(ns)} s"


class LivenessMonitor:
    """Decides when a process hangs. check() must be called every CHECK_INTERVAL_S."""

    def __init__(
        self,
        read: Callable[[], Heartbeat],
        limit_s: float,
        *,
        stopped_s: float = MAX_STOPPED_S,
        state: Callable[[int], str | None] = process_state,
        waited: Callable[[int], int] = runqueue_wait_ns,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """limit_s: allowed silence while there is work, beyond the time of the step. 0: any.

        stopped_s: how long a process may be stopped by a signal.
        """
        self._read = read
        self._limit_s = limit_s
        self._max_stopped_s = stopped_s
        self._state = state
        self._read_runqueue_wait = waited
        self._clock = clock
        self._runqueue_wait_ns = 0
        self._checked_at = clock()
        self._last_progress = (0, 0)
        self._silent_s = 0.0  # time in which this process was awake
        self._stopped_s: float | None = None  # since it was first seen stopped
        self._start_time_s: float | None = None
        self.set_start_time(None)

    @property
    def is_enabled(self) -> bool:
        """Whether check() does anything."""
        return self._limit_s > 0

    def set_start_time(self, seconds: float | None) -> None:
        """How long a start took. None: not known yet, so a start has no limit."""
        self._start_time_s = seconds

    def check(self, pid: int) -> str | None:
        """Returns why the process hangs. None: it does not."""
        now = self._clock()
        awake_s = min((now - self._checked_at) / 1e9, 2 * CHECK_INTERVAL_S)
        self._checked_at = now
        if not self.is_enabled:
            return None
        if self._state(pid) == "T":
            self._stopped_s = 0.0 if self._stopped_s is None else self._stopped_s + awake_s
            return PROCESS_STOPPED if self._stopped_s >= self._max_stopped_s else None
        self._stopped_s = None
        beat = self._read()
        if beat.pid != pid:  # it has not started: this is the page of the engine before
            beat = Heartbeat(EnginePhase.STARTING, pid)
        return self._check_progress(beat, awake_s - self._runqueue_wait_s(pid))

    def _runqueue_wait_s(self, pid: int) -> float:
        """How long it has waited for a processor since the last check."""
        before, self._runqueue_wait_ns = self._runqueue_wait_ns, self._read_runqueue_wait(pid)
        return (self._runqueue_wait_ns - before) / 1e9  # meaningless once after a restart

    def _check_progress(self, beat: Heartbeat, had_s: float) -> str | None:
        """had_s: how long it could have worked since the last check. It is negative if a long wait
        for a processor has just ended: the kernel counts it then.
        """
        mark = (beat.pid, beat.progress_at)
        if mark != self._last_progress:
            self._last_progress, self._silent_s = mark, 0.0
            return None
        self._silent_s = max(self._silent_s + had_s, 0.0)
        limit_s = self._silence_limit_s(beat)
        if limit_s is None or self._silent_s <= limit_s:
            return None
        what = "no heartbeat"
        if beat.phase == EnginePhase.STARTING:
            what = "its start has not finished"
        elif beat.working:
            what = "no step has finished"
        return f"{what} for {self._silent_s:.0f} s; the limit is {limit_s:.0f} s"

    def _silence_limit_s(self, beat: Heartbeat) -> float | None:
        """Allowed seconds of silence. None: any number."""
        if beat.phase == EnginePhase.STARTING:
            start_s = self._start_time_s
            return None if start_s is None else self._limit_s + START_TIME_FACTOR * start_s
        if beat.phase != EnginePhase.SERVING or beat.unbounded_since:
            return None
        return self._limit_s + ALIVE_STEP_FACTOR * beat.expected_ns / 1e9
