"""Faults at chosen points: which, when, and what happens there.

A `Faults` is a folder. A test writes there what is to happen; processes that were started for that
(tests.faults.serve), or this one within `here()`, look there at every call of a point. What has
happened is in the folder too, and when, so a fault that ends a process is not had again by the next.
"""

import inspect
import json
import os
import shutil
import signal
import struct
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults import points

_COUNT = struct.Struct("<q")


class Injected(Exception):
    """Nothing else raises this."""


@dataclass(frozen=True)
class Fault:
    """point: a name of tests.faults.points.

    do      raise | sleep (seconds) | hang | kill (SIGKILL) | stop (SIGSTOP) | exit |
            nan | inf | nothing_allowed
            The last three: of "sample" only; the row's logits become NaN, +inf, all -inf.
            count: nothing happens, and `Faults.calls` tells how often it could have
    at      the so-many-th call counts first, since it was armed, in each process anew
    times   so often; 0: always from then on
    id      only calls for requests whose id has this in it (X-Request-Id comes through)
    seed    only calls for requests with this seed: what a client can set most easily
    """

    point: str
    do: str = "raise"
    at: int = 1
    times: int = 1
    id: str = ""
    seed: int | None = None
    seconds: float = 0.0

    def meets(self, who):
        """Whether a call of the point for these requests counts."""
        if not self.id and self.seed is None:
            return True
        return any(self.is_meant(one) for one in who)

    def is_meant(self, one):
        return self.id in one[0] and (self.seed is None or self.seed == one[1])


class Faults:
    """The test's side, and what wrapped functions ask."""

    def __init__(self, folder=None):
        self.folder = Path(folder or tempfile.mkdtemp(prefix="quire-faults-"))
        self._file = self.folder / "armed.json"
        self._seen = None
        self._armed, self._calls, self._number = [], [], 0
        self._lock = threading.Lock()
        self._counts = None  # where this process writes its calls
        self.other_threads = set()  # whose calls do not count

    def arm(self, *faults):
        """These from now on, and no others."""
        self._number += 1
        said = {"number": self._number, "faults": [asdict(one) for one in faults]}
        new = self.folder / f"new-{self._number}"
        new.write_text(json.dumps(said))
        new.replace(self._file)

    def clear(self):
        self.arm()

    @property
    def fired(self):
        """How many have happened since arm()."""
        return len(self.fired_at)

    @property
    def fired_at(self):
        """When they have happened, in their order; moments of time.monotonic()."""
        files = self.folder.glob(f"fired-{self._number}-*")
        return sorted(float(file.read_text() or "inf") for file in files)

    @property
    def calls(self):
        """How often each of the faults that count could have happened since arm(), of the one
        process that has called most."""
        found = [0] * len(json.loads(self._file.read_text())["faults"])
        for file in self.folder.glob(f"calls-{self._number}-*"):
            told = [count for (count,) in _COUNT.iter_unpack(file.read_bytes())]
            found = [max(pair) for pair in zip(found, told + [0] * len(found))]
        return found

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- below: in the process where the points are ---------------------------------------------

    def met(self, name, who):
        """The fault that happens at this call, if one does."""
        if threading.get_ident() in self.other_threads:
            return None
        with self._lock:
            self._look()
            for i, fault in enumerate(self._armed):
                if fault.point == name and fault.meets(who):
                    self._calls[i] += 1
                    if fault.do == "count":
                        os.pwrite(self._counts, _COUNT.pack(self._calls[i]), i * _COUNT.size)
                    elif self._calls[i] >= fault.at and self._take(i, fault):
                        return fault
        return None

    def _look(self):
        try:
            seen = self._file.stat().st_mtime_ns, self._file.stat().st_ino
        except FileNotFoundError:
            return
        if seen == self._seen:
            return
        self._seen = seen
        said = json.loads(self._file.read_text())
        self._number = said["number"]
        self._armed = [Fault(**one) for one in said["faults"]]
        self._calls = [0] * len(self._armed)
        if self._counts is not None:
            os.close(self._counts)
            self._counts = None
        if any(fault.do == "count" for fault in self._armed):
            path = self.folder / f"calls-{self._number}-{os.getpid()}"
            self._counts = os.open(path, os.O_CREAT | os.O_WRONLY)

    def _take(self, i, fault):
        """Count it, unless it has happened often enough, here or in another process."""
        for n in range(fault.times or 1):
            try:
                path = self.folder / f"fired-{self._number}-{i}-{n}"
                file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                continue
            os.write(file, repr(time.monotonic()).encode())
            os.close(file)
            return True
        return not fault.times


def happen(fault):
    """What is the same at every point."""
    if fault.do == "raise":
        raise Injected(f"injected at {fault.point}")
    if fault.do == "sleep":
        time.sleep(fault.seconds)
    elif fault.do == "hang":
        while True:
            time.sleep(3600)
    elif fault.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.do == "exit":
        os._exit(3)


SPOILT = {"nan": float("nan"), "inf": float("inf"), "nothing_allowed": -float("inf")}


def spoil(fault, logits, slots):
    """Make the rows of whom it concerns what no model should say."""
    for row, slot in enumerate(slots):
        joined = points.SEATED.get(int(slot))
        if joined is not None and any(map(fault.is_meant, points.of_join(None, joined))):
            logits[row] = SPOILT[fault.do]


def wrapped(function, name, point, faults):
    """The function, which has faults."""

    def call(*args, **named):
        fault = faults.met(name, list(point.who(*args, **named)))
        if fault is not None and fault.do in SPOILT:
            spoil(fault, *args[1:3])
        elif fault is not None:
            happen(fault)
        return function(*args, **named)

    async def call_async(*args, **named):
        fault = faults.met(name, list(point.who(*args, **named)))
        if fault is not None:
            happen(fault)
        return await function(*args, **named)

    return call_async if inspect.iscoroutinefunction(function) else call


def install(faults, some=points.ENGINE):
    """Wrap the points of this process. Returns what undoes it."""
    undo = [points.watch_slots()] if some is points.ENGINE else []
    for name, point in some.items():
        owner, attribute = points.find(point.place)
        before = vars(owner)[attribute]
        setattr(owner, attribute, wrapped(before, name, point, faults))
        undo.append(
            lambda owner=owner, attribute=attribute, was=before: setattr(owner, attribute, was)
        )
    return lambda: [one() for one in reversed(undo)]


@contextmanager
def here():
    """Faults for engines in this process: Engine, LLM, EngineThread. Ready before they are made.

    Threads that exist already are left alone: they run the servers that other tests share.
    """
    faults = Faults()
    faults.other_threads = {one.ident for one in threading.enumerate()} - {threading.get_ident()}
    undo = install(faults)
    try:
        yield faults
    finally:
        undo()
        points.SEATED.clear()
        points.BOUND.clear()
        faults.remove()
