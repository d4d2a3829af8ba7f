"""What a process leaves to its starter: stacks of its threads, asked for or of its fault.

The process writes them itself, by a handler in C that needs no interpreter (faulthandler), into a
file that its starter has too. A thread that hangs in native code shows the Python that called it,
and the kernel says in what it waits.
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

STACKS = signal.SIGUSR1
"""What has the process write its stacks; see quire.engine.process."""
WRITE_S = 1.0
"""It gets this long to write them."""
LOOK_S = 0.02
MOST_BYTES = 1 << 20
MOST_TASKS = 64
_FILE = re.compile(r'File "([^"]*)"')
_PACKAGES = re.compile(r".*/(?:site-packages|dist-packages|lib/python[0-9.]+)/")


class Leaver(Protocol):
    """A process, and the file for its stacks."""

    process: subprocess.Popen[bytes]
    stacks: IO[bytes]


def show(child: Leaver, what: str, *, asking: bool) -> None:
    """Log what is wrong with it, and where its threads are. asking: it may be able to say that."""
    threads = tasks(child.process.pid)
    log.error("%s. Its threads:\n%s", what, threads)
    stacks = ask(child) if asking else ""
    if stacks:
        log.error("where they are:\n%s", stacks.rstrip())


def ask(child: Leaver) -> str:
    """Have it write the stacks of all its threads, which it does whatever they are at. What came,
    "" if nothing did: a stopped process writes nothing.
    """
    before = _size(child)
    with contextlib.suppress(ProcessLookupError):
        child.process.send_signal(STACKS)
    deadline, seen = time.monotonic() + WRITE_S, before
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        size = _size(child)
        if size == seen > before:
            break  # nothing more comes
        seen = size
    return _read(child, before)


def left(child: Leaver) -> str:
    """The stacks that it wrote when it died of a fault; "" if it did not."""
    return _read(child, 0)


def tasks(pid: int) -> str:
    """Its threads as the kernel knows them: name, state, and what each waits for."""
    lines = []
    for folder in sorted(Path(f"/proc/{pid}/task").glob("[0-9]*"))[:MOST_TASKS]:
        words = (_word(folder / name) for name in ("comm", "stat", "wchan"))
        name, stat, waits = words
        state = stat.rpartition(")")[2].split()[:1]
        lines.append(f"  {name or '?'}: {''.join(state) or '?'} {waits.strip('0')}".rstrip())
    return "\n".join(lines)


def without_paths(text: str) -> str:
    """Stacks that name modules, not places on this machine."""
    return _FILE.sub(lambda found: f'File "{_short(found[1])}"', text)


def _short(path: str) -> str:
    inside = _PACKAGES.sub("", path)
    if inside != path:
        return inside
    _, ours, module = path.rpartition("/quire/")
    return f"quire/{module}" if ours else os.path.basename(path)


def _size(child: Leaver) -> int:
    return os.fstat(child.stacks.fileno()).st_size


def _read(child: Leaver, since: int) -> str:
    data = os.pread(child.stacks.fileno(), MOST_BYTES, since)
    return without_paths(data.decode(errors="replace"))


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
