"""Measures the memory of a server process from within: a thread writes a line at intervals.

bench/soak.py loads it into the processes of a server as `sitecustomize` in a folder of PYTHONPATH;
quire does not refer to it. RSS alone does not separate a leak from a heap that does not shrink, so
three owners of memory are counted separately: Python's blocks, malloc's bytes in use and malloc's
free bytes. When the file `mark` or `end` appears in the folder, objects are counted by type (and
allocations by line, with SOAK_TRACE): growth between the two is reported.
"""

import collections
import contextlib
import ctypes
import functools
import gc
import json
import os
import sys
import threading
import time
import tracemalloc

EVERY_S = 1.0
TOP = 16


class Mallinfo(ctypes.Structure):
    """Result of glibc's mallinfo2()."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@functools.cache
def mallinfo():
    """Return the function of libc; None if it is missing."""
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    found.restype = Mallinfo
    return found


def malloc_state():
    """Return the bytes in use and free, of all arenas."""
    function = mallinfo()
    if function is None:
        return None
    found = function()
    return found.uordblks + found.hblkhd, found.fordblks


def trimmed_mib():
    """Return the RSS after malloc has returned its free memory to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return round(int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20, 2)


def tasks():
    """Count unfinished tasks of all event loops; None: they change too fast."""
    loaded = sys.modules.get("asyncio.tasks")
    for _ in range(100):
        try:
            return sum(not one.done() for one in list(loaded._all_tasks)) if loaded else 0
        except RuntimeError:  # it changed during the iteration
            continue
    return None


def line():
    used, unused = malloc_state() or (0, 0)
    return {
        "at": time.monotonic(),
        "tasks": tasks(),
        "python_blocks": sys.getallocatedblocks(),
        "malloc_used": used,
        "malloc_free": unused,
    }


def by_type():
    gc.collect()
    kinds = (f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())
    return collections.Counter(kinds)


def garbage():
    """Collect garbage. Returns the collected objects by type."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    kinds = collections.Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.garbage)
    gc.garbage.clear()
    gc.collect()
    return sum(kinds.values()), kinds.most_common(TOP)


def by_line():
    if not tracemalloc.is_tracing():
        return None
    return tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, __file__)])


def grown(before, after):
    """Return the types whose number has grown."""
    more = collections.Counter(after)
    more.subtract(before)
    return [(kind, count) for kind, count in more.most_common(TOP) if count > 0]


def run(folder):
    path = os.path.join(folder, f"{os.getpid()}.jsonl")
    before = traced = trimmed = None
    while True:
        if before is None and os.path.exists(os.path.join(folder, "mark")):
            if os.environ.get("SOAK_TRACE"):
                tracemalloc.start(6)
            before, traced, trimmed = by_type(), by_line(), trimmed_mib()
        found = line()
        ended = os.path.exists(os.path.join(folder, "end"))
        if ended and before is not None:
            found["garbage"] = garbage()
            found["python_blocks_without"] = sys.getallocatedblocks()
            found["trimmed_mib"] = [trimmed, trimmed_mib()]
            found["grown"] = grown(before, by_type())
            if traced is not None:
                lines = by_line().compare_to(traced, "traceback")[:TOP]
                found["lines"] = [[str(one), one.traceback.format()] for one in lines]
        with open(path, "a") as file:
            file.write(json.dumps(found) + "\n")
        if ended:
            return
        time.sleep(EVERY_S)


if os.environ.get("SOAK_PROBE"):
    threading.Thread(target=run, args=[os.environ["SOAK_PROBE"]], daemon=True).start()
