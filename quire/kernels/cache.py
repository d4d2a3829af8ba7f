"""Many GPU kernels compiled at once, by rehearsing the steps that need them.

Not here: kernels, which steps (quire.engine.warm), what the folder of compiled kernels looks like
(quire.platform.kernel_store). The one idea: Triton asks a hook before it compiles, and a hook may
say no; so a step run with such a hook tells all the kernels it needs without waiting for any, and
they are then compiled side by side, in processes.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
MOST_FILES = 1 << 16
MOST_KERNELS = 1 << 13
"""Numbers that a pipe holds: it takes 64 KiB."""
_NUMBER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A kernel that a rehearsal would have compiled."""

    name: str
    function: Any  # triton.runtime.JITFunction
    specialization: str

    def make(self) -> None:
        """Compile it (or read it from the folder) for the current device."""
        self.function.preload(self.specialization)


def keep_in(folder: Path) -> None:
    """Make Triton keep what it compiles in the folder. Before the first kernel."""
    from triton import knobs

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning(
            "compiled kernels cannot be kept in %s (%s): every start compiles", folder, error
        )
        folder = Path(tempfile.mkdtemp(prefix="quire-kernels-"))
    knobs.cache.dir = str(folder)


def know_compiler() -> None:
    """Let Triton make the part of its keys that names the compiler: it reads 400 MB for that."""
    from triton.runtime import cache

    key = getattr(cache, "triton_key", None)
    if key is not None:
        key()


_rehearsals = 0


def rehearsing() -> bool:
    """Whether launches are skipped now: an op may then go through kernels of other steps too."""
    return _rehearsals > 0


@contextmanager
def rehearsal(note: Callable[[Wanted], None]) -> Iterator[None]:
    """Within, kernels not compiled yet are noted, once each, and their launches are skipped."""
    from triton import knobs

    seen: set[tuple[str, str]] = set()

    def skip(*, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **_: Any) -> bool:
        if is_manual_warmup:
            return False  # the compilation itself, in another thread
        name = f"{fn.module}.{fn.name}"
        data = str(compile["specialization_data"])
        if (name, data) not in seen:
            seen.add((name, data))
            note(Wanted(name, fn.jit_function, data))
        return True

    global _rehearsals
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = skip
    _rehearsals += 1
    try:
        yield
    finally:
        _rehearsals -= 1
        knobs.runtime.jit_cache_hook = before


class _NotKept(Exception):
    """A kernel is not in the folder."""


def load_kept(wanted: Sequence[Wanted]) -> list[Wanted]:
    """Load what the folder holds; the others, which have to be compiled."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class Kept(FileCacheManager):
        def get_group(self, filename: str) -> Any:
            found = super().get_group(filename)
            if not found:
                raise _NotKept
            return found

    before, missing = knobs.cache.manager_class, []
    knobs.cache.manager_class = Kept
    try:
        for one in wanted:
            try:
                one.make()
            except _NotKept:
                missing.append(one)
            except Exception:  # it fails again, and tells, where it is used
                log.debug("%s cannot be made ready", one.name, exc_info=True)
                missing.append(one)
    finally:
        knobs.cache.manager_class = before
    return missing


def compile_in_children(
    wanted: Sequence[Wanted], urgent: int, count: int, seconds: float
) -> list[Wanted]:
    """Compile into the folder in `count` forked processes; load the first `urgent` as they come.

    In processes, so that Triton's front end, a tenth of a second of Python a kernel, runs on many
    cores; on an H200's machine that has not made a cold start faster than threads did.
    No other thread may be compiling. A child never touches the device, and ends without cleaning
    up. The others go on after this has returned, so late kernels are found in the folder; one that
    is not done after `seconds` is killed. Returns those of the urgent that did not come.
    """
    from triton.runtime import driver

    target = driver.active.get_current_target()
    began = time.monotonic()
    line = _Line(wanted, urgent)
    children = [_fork(line, target) for _ in range(min(count, len(wanted)))]
    line.close()
    log.debug("%d compilers after %.2f s", len(children), time.monotonic() - began)
    until = began + seconds
    pending = list(wanted[:urgent])
    while pending and children and time.monotonic() < until:
        time.sleep(0.03)
        children = [pid for pid in children if not _ended(pid)]
        pending = load_kept(pending)
    threading.Thread(target=_reap, args=(children, until), daemon=True).start()
    return pending


def _reap(children: Sequence[int], until: float) -> None:
    while children and time.monotonic() < until:
        time.sleep(0.2)
        children = [pid for pid in children if not _ended(pid)]
    for pid in children:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # whoever ignores SIGCHLD has no children to wait for
        return True


class _Line:
    """Kernels in the order in which compilers take them: a pipe that holds all their numbers."""

    def __init__(self, wanted: Sequence[Wanted], urgent: int) -> None:
        assert len(wanted) < MOST_KERNELS, len(wanted)  # they all fit in the pipe
        self._wanted = wanted
        self._urgent = urgent
        self.fd, into = os.pipe()
        os.write(into, b"".join(_NUMBER.pack(i) for i in range(len(wanted))))
        os.close(into)

    def close(self) -> None:
        os.close(self.fd)

    def make_all(self) -> None:
        """In a child: compile until none is left; what can wait with less haste."""
        began, hasty = time.monotonic(), True
        while len(word := os.read(self.fd, _NUMBER.size)) == _NUMBER.size:
            (i,) = _NUMBER.unpack(word)
            if hasty and i >= self._urgent:
                hasty = False
                os.nice(10)
            at = time.monotonic()
            with suppress(Exception):  # it fails again, and tells, where it is used
                self._wanted[i].make()
            took = time.monotonic() - at
            log.debug("%.2f s, after %.2f s: %s", took, at - began, self._wanted[i].name)


def _fork(line: _Line, target: Any) -> int:
    """A child that compiles what it finds in the line, and ends; its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads do not live on in the child: none must
        pid = os.fork()
    if pid:
        return pid
    try:
        from triton.runtime import driver

        gc.disable()  # what it found might end on the device
        _let_go(line.fd)
        driver.set_active(_Target(target))
        line.make_all()
    finally:
        os._exit(0)  # exit handlers would touch the device that is the parent's


def _let_go(kept: int) -> None:
    """In a child: end when the parent does, and keep none of its files open but one.

    The driver frees the memory of a process when nobody has its device files any more.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.closerange(3, kept)
    os.closerange(kept + 1, MOST_FILES)


@dataclass(frozen=True, slots=True)
class _Target:
    """Triton's driver as far as compiling asks for it."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0
