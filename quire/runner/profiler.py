"""Profiler: names ranges of a step's time, and records traces of some steps.

The ranges appear in torch's profiler, and in Nsight Systems through NVTX. While they are off, a
range costs a function call. bench/host.py counts the device's idle time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_NO_SPAN: AbstractContextManager[object] = nullcontext()
_enabled = False


def set_spans_enabled(on: bool) -> None:
    """Turn the ranges on or off."""
    global _enabled
    _enabled = on


def span(name: str) -> AbstractContextManager[object]:
    """A range of the host's time."""
    return _record_span(name) if _enabled else _NO_SPAN


@contextmanager
def _record_span(name: str) -> Iterator[None]:
    marks = torch.cuda.is_available()
    with torch.autograd.profiler.record_function(name):
        if marks:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if marks:
                torch.cuda.nvtx.range_pop()


class StepProfiler:
    """A trace of `steps` steps after the first `skip`, for chrome://tracing or Perfetto."""

    def __init__(self, folder: Path, *, skip: int, steps: int) -> None:
        self._folder = folder
        self._skip, self._stop_at = skip, skip + steps
        self._step = 0
        self._profiler: torch.profiler.profile | None = None

    def before_step(self) -> None:
        """Count a step; called before each."""
        if self._step == self._skip:
            self._start()
        elif self._step == self._stop_at:
            self.stop()
        self._step += 1

    def stop(self) -> None:
        """End the recording and write it; nothing if there is none."""
        if self._profiler is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        set_spans_enabled(False)
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps-{os.getpid()}-{time.time_ns()}.json"
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        log.info("wrote a trace of %d steps to %s", self._stop_at - self._skip, path)

    def _start(self) -> None:
        self._profiler = torch.profiler.profile()
        self._profiler.start()
        set_spans_enabled(True)
