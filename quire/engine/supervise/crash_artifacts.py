"""Crash artifacts: stacks of the threads of a child process, on request or after a fault.

The process writes them with a C handler that needs no interpreter (faulthandler), into a file that
its parent shares. A thread that hangs in native code shows the Python that called it; the kernel
names what it waits for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, Protocol

log = logging.getLogger(__name__)

STACK_DUMP_SIGNAL = signal.SIGUSR1
"""Signal that makes the process write its stacks; see quire.engine.core.process."""
STACK_DUMP_S = 1.0
"""Seconds for the process to write them."""
STACK_POLL_S = 0.02
MAX_STACK_BYTES = 1 << 20
MAX_THREADS = 64
_FILE = re.compile(r'File "([^"]*)"')
_PACKAGES = re.compile(r".*/(?:site-packages|dist-packages|lib/python[0-9.]+)/")


class StackDumper(Protocol):
    """A process, and the file for its stacks."""

    process: subprocess.Popen[bytes]
    stacks_file: IO[bytes]


def log_thread_stacks(child: StackDumper, what: str, *, asking: bool) -> None:
    """Log the reason and the threads of a process. asking: also request its stacks."""
    threads = list_threads(child.process.pid)
    log.error("%s. Its threads:\n%s", what, threads)
    stacks = dump_stacks(child) if asking else ""
    if stacks:
        log.error("their stacks:\n%s", stacks.rstrip())


def dump_stacks(child: StackDumper) -> str:
    """Request the stacks of all its threads. Returns them; "" if none came: a stopped process
    writes nothing.
    """
    before = _stacks_size(child)
    with contextlib.suppress(ProcessLookupError):
        child.process.send_signal(STACK_DUMP_SIGNAL)
    deadline, seen = time.monotonic() + STACK_DUMP_S, before
    while time.monotonic() < deadline:
        time.sleep(STACK_POLL_S)
        size = _stacks_size(child)
        if size == seen > before:
            break  # it has written all
        seen = size
    return _read_stacks(child, before)


def read_crash_stacks(child: StackDumper) -> str:
    """The stacks that it wrote when it died of a fault; "" if it wrote none."""
    return _read_stacks(child, 0)


def list_threads(pid: int) -> str:
    """Its threads as the kernel lists them: name, state, and what each waits for."""
    lines = []
    for folder in sorted(Path(f"/proc/{pid}/task").glob("[0-9]*"))[:MAX_THREADS]:
        words = (_read_text(folder / name) for name in ("comm", "stat", "wchan"))
        name, stat, waits = words
        state = stat.rpartition(")")[2].split()[:1]
        lines.append(f"  {name or '?'}: {''.join(state) or '?'} {waits.strip('0')}".rstrip())
    return "\n".join(lines)


def strip_paths(text: str) -> str:
    """Stacks with names of modules in place of paths."""
    return _FILE.sub(lambda found: f'File "{_short_path(found[1])}"', text)


def _short_path(path: str) -> str:
    inside = _PACKAGES.sub("", path)
    if inside != path:
        return inside
    _, ours, module = path.rpartition("/quire/")
    return f"quire/{module}" if ours else os.path.basename(path)


def _stacks_size(child: StackDumper) -> int:
    return os.fstat(child.stacks_file.fileno()).st_size


def _read_stacks(child: StackDumper, since: int) -> str:
    data = os.pread(child.stacks_file.fileno(), MAX_STACK_BYTES, since)
    return strip_paths(data.decode(errors="replace"))


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
