"""Late work: kernels compiled or first loaded, and CUDA graphs captured, after the engine is ready.

Start-up is to leave none of it: requests wait for it. The module counts it for one process, so each
rank of a model has its own counts, and logs each event. Standard library only.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.core.snapshot import LateWorkCounts

log = logging.getLogger(__name__)

WARNINGS_PER_MINUTE = 10
"""Events logged in a minute; the next line has the number of the others."""


class LateWorkRecorder:
    """Counts and logs events. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ready = False
        self.counts = LateWorkCounts()
        """Replaced by another object when an event is counted."""
        self._clock = clock
        self._lock = threading.Lock()
        self._minute_began = -60.0
        self._logged = self._not_logged = 0

    def set_ready(self, ready: bool) -> None:
        """Count from now on, beginning with 0, or stop counting."""
        with self._lock:
            self.ready = ready
            if ready:
                self.counts = LateWorkCounts()

    def note(self, what: str, seconds: float, kernels: int, captures: int) -> None:
        """Count one event that has just ended, and log it."""
        with self._lock:
            if not self.ready:
                return
            before = self.counts
            self.counts = LateWorkCounts(
                before.kernel_compilations + kernels,
                before.graph_captures + captures,
                before.seconds + seconds,
            )
            now = self._clock()
            if now - self._minute_began >= 60.0:
                self._minute_began, self._logged = now, 0
            if self._logged == WARNINGS_PER_MINUTE:
                self._not_logged += 1
                return
            self._logged += 1
            others, self._not_logged = self._not_logged, 0
        log.warning(
            "%s: %.0f ms, in which requests waited%s. Start-up should have prepared "
            "it; please report this line with the model and the options",
            what,
            1000 * seconds,
            f" ({others} more such events were not logged)" if others else "",
        )


_recorder = LateWorkRecorder()
_preparation_callback: weakref.WeakMethod[Callable[[bool], None]] | None = None


def set_preparation_callback(callback: Callable[[bool], None]) -> None:
    """Call callback(True) when this process begins to prepare a kernel or a graph, and
    callback(False) when it has finished: a rank that compiles does not hang.

    callback: a method of an object that this module may outlive.
    """
    global _preparation_callback
    _preparation_callback = weakref.WeakMethod(callback)


@contextmanager
def preparing() -> Iterator[None]:
    """Within, a kernel is compiled or a graph is captured."""
    callback = None if _preparation_callback is None else _preparation_callback()
    if callback is None:
        yield
        return
    callback(True)
    try:
        yield
    finally:
        callback(False)


def set_ready(ready: bool) -> None:
    """Begin to count, from 0: the engine of this process is ready. False: it is not."""
    _recorder.set_ready(ready)


def is_ready() -> bool:
    """Whether events are counted now."""
    return _recorder.ready


def counts() -> LateWorkCounts:
    """Return the counts since the engine became ready; the same object until the next event."""
    return _recorder.counts


def note_kernel(name: str, seconds: float) -> None:
    """Count a kernel that was compiled, read from disk, or first loaded to the device."""
    _recorder.note(f"kernel {name} was compiled or loaded after start-up", seconds, 1, 0)


def note_graph_capture(key: str, seconds: float) -> None:
    """Count the capture of a CUDA graph."""
    _recorder.note(f"CUDA graph {key} was captured after start-up", seconds, 0, 1)


@contextmanager
def uncounted() -> Iterator[None]:
    """Within, nothing is counted: waking up does again what start-up did."""
    before, _recorder.ready = _recorder.ready, False
    try:
        yield
    finally:
        _recorder.ready = before


@contextmanager
def starting_up() -> Iterator[None]:
    """Within, nothing is counted; nor afterwards until set_ready(True), unless start-up fails."""
    before, _recorder.ready = _recorder.ready, False
    try:
        yield
    except BaseException:
        _recorder.ready = before
        raise
