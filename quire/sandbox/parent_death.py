"""Parent death: ends a child process with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, even if it is stopped
    by a signal. Does nothing where there is no such call.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
