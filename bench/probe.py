"""What a process of a server holds, seen from within: a thread that writes a line now and then.

Put before everything else in the processes of a server by bench/soak.py, as `sitecustomize` in a
folder of PYTHONPATH; quire knows nothing of it. RSS alone does not tell a leak from a heap that
does not shrink, so the three owners of memory are counted by themselves: Python's blocks, malloc's
bytes in use and malloc's free ones. When the file `mark` or `end` appears in the folder, objects
are counted by type (and allocations by line, with SOAK_TRACE): what grew between the two is told.
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
    """Of glibc: what mallinfo2() gives."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@functools.cache
def mallinfo():
    """The function; None where there is none."""
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    found.restype = Mallinfo
    return found


def malloc_state():
    """Bytes in use and free, of all arenas."""
    function = mallinfo()
    if function is None:
        return None
    found = function()
    return found.uordblks + found.hblkhd, found.fordblks


def trimmed_mib():
    """RSS once malloc has given back what is free: the same pages would be used again."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return round(int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20, 2)


def tasks():
    """Tasks of whatever event loop there is that are not done; None: they change too fast."""
    loaded = sys.modules.get("asyncio.tasks")
    for _ in range(100):
        try:
            return sum(not one.done() for one in list(loaded._all_tasks)) if loaded else 0
        except RuntimeError:  # it changed while we looked
            continue
    return None


def line():
    used, spare = malloc_state() or (0, 0)
    return {
        "at": time.monotonic(),
        "tasks": tasks(),
        "python_blocks": sys.getallocatedblocks(),
        "malloc_used": used,
        "malloc_free": spare,
    }


def by_type():
    gc.collect()
    kinds = (f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())
    return collections.Counter(kinds)


def garbage():
    """What waited for the collector, by type."""
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
    """Types of which there are more."""
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
