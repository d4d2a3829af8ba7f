"""Tells from the beat (quire.engine.heartbeat_page) whether an engine gets on with its work.

Two questions. A probe asks whether a request that comes now would be worked on: if not, traffic had
better go elsewhere for a while, so it asks early. The watchdog asks whether the engine will ever
get on: a no to that ends it, so it asks late, and counts only time in which it was awake itself and
the process was not kept waiting for a processor. A machine that stood still makes nobody late, nor
does one that is overloaded.

The event loop of an API process beats on a page of the same kind
(quire.server.process.api_process_monitor), and is
watched by the same watchdog.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quire.engine.heartbeat_page import EnginePhase, Heartbeat

READY_SILENCE_S = 3.0
"""Beyond what is expected of its step, an engine may be silent for so long and count as ready."""
READY_STEP_FACTOR = 3
"""A step may take so many times what is expected, and the engine counts as ready."""
ALIVE_STEP_FACTOR = 10
"""And as alive."""
MAX_STOPPED_S = 2.0
"""A process that was stopped by a signal for so long will not go on by itself."""
CHECK_INTERVAL_S = 0.5
"""How often the watchdog looks."""
START_TIME_FACTOR = 10
"""Another start may take so many times what the first one took."""
PROCESS_STOPPED = "its process is stopped"


class Unhealthy(NamedTuple):
    """Why an engine would not work on a request. code: for programs."""

    code: str
    message: str


def check_readiness(beat: Heartbeat, now: int, state: str | None = None) -> Unhealthy | None:
    """Why a request that comes now would not be worked on. state: of state_of(beat.pid)."""
    if beat.phase == EnginePhase.STARTING:
        return Unhealthy(
            "starting", f"the engine starts, for {_seconds(now - beat.beat_at)} s so far"
        )
    if beat.phase != EnginePhase.SERVING or (state is not None and state in "XZ"):
        return Unhealthy("gone", "there is no engine")
    if state is not None and state in "Tt":
        return Unhealthy("stopped", "the engine's process is stopped")
    if beat.unbounded_since:
        return Unhealthy(
            "occupied", f"the engine is at a profile, {_for_seconds(now - beat.unbounded_since)}"
        )
    silent = now - max(beat.progress_at, 0)
    if not beat.working:
        if silent > READY_SILENCE_S * 1e9:
            return Unhealthy("silent", f"the engine gives no sign of life, {_for_seconds(silent)}")
        return None
    if silent > READY_SILENCE_S * 1e9 + READY_STEP_FACTOR * beat.expected_ns:
        return Unhealthy(
            "stalled", f"there is work, and none of it gets done, {_for_seconds(silent)}"
        )
    return None


def process_state(pid: int) -> str | None:
    """The state of a process in the kernel's letters: T is stopped, t traced, X gone. None: who
    knows."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X" if Path("/proc/self/stat").exists() else None
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]


def runqueue_wait_ns(pid: int) -> int:
    """How long the main thread of a process has waited for a processor; 0 where nobody counts."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.1f}"


def _for_seconds(ns: int) -> str:
    return f"for {_seconds(ns)} s"


class LivenessMonitor:
    """The watchdog. look() is called every TICK_S; it says when a process is beyond hope."""

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
        """limit_s: of silence while there is work, beyond what its step may take. 0: never.

        stopped_s: a process that a signal has stopped for so long will not go on by itself.
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
        self._silent_s = 0.0  # in which we were awake
        self._stopped_s: float | None = None  # since it was first seen so
        self._start_time_s: float | None = None
        self.set_start_time(None)

    @property
    def is_enabled(self) -> bool:
        """It is to look at all."""
        return self._limit_s > 0

    def set_start_time(self, seconds: float | None) -> None:
        """What a start took. None: nobody knows yet, and a start may take for ever."""
        self._start_time_s = seconds

    def check(self, pid: int) -> str | None:
        """What is wrong with the engine of this process, if it will not mend."""
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
        if beat.pid != pid:  # it has not begun, and this is the page of the one before
            beat = Heartbeat(EnginePhase.STARTING, pid)
        return self._check_progress(beat, awake_s - self._runqueue_wait_s(pid))

    def _runqueue_wait_s(self, pid: int) -> float:
        """How long it has waited for a processor since the last look."""
        before, self._runqueue_wait_ns = self._runqueue_wait_ns, self._read_runqueue_wait(pid)
        return (
            self._runqueue_wait_ns - before
        ) / 1e9  # nonsense of another process: that begins anew

    def _check_progress(self, beat: Heartbeat, had_s: float) -> str | None:
        """had_s: since the last look it could have worked for so long. Less than nothing, if a long
        wait for a processor has ended just now: the kernel counts it then.
        """
        mark = (beat.pid, beat.progress_at)
        if mark != self._last_progress:
            self._last_progress, self._silent_s = mark, 0.0
            return None
        self._silent_s = max(self._silent_s + had_s, 0.0)
        limit_s = self._silence_limit_s(beat)
        if limit_s is None or self._silent_s <= limit_s:
            return None
        what = "it is silent"
        if beat.phase == EnginePhase.STARTING:
            what = "its start does not end"
        elif beat.working:
            what = "its work does not get on"
        return f"{what}, for {self._silent_s:.0f} s; at most {limit_s:.0f} s are allowed"

    def _silence_limit_s(self, beat: Heartbeat) -> float | None:
        """Seconds of silence. None: any number."""
        if beat.phase == EnginePhase.STARTING:
            start_s = self._start_time_s
            return None if start_s is None else self._limit_s + START_TIME_FACTOR * start_s
        if beat.phase != EnginePhase.SERVING or beat.unbounded_since:
            return None
        return self._limit_s + ALIVE_STEP_FACTOR * beat.expected_ns / 1e9
