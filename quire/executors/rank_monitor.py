"""Rank monitor: a thread that starts the processes of ranks, and finds those that die or hang.

It sleeps in the kernel until a process ends, and looks at the status page twice a second. A failure
is final: all ranks are killed, which ends the collectives in which the others wait, and the engine
is to be started again.

    death       the process has ended
    stopped     a signal has stopped the process, for MAX_STOPPED_S
    alone       one rank raised, and others did not finish the step within FAILURE_GRACE_S
    hang        the oldest message was not finished within its limit, while no rank prepares kernels
    late        the end was not reached within its limit
    node        the agent of another node reports one of these, or is gone

Rank 0 alone does not hang here: an interrupted wait leaves its step unfinished, and the engine's
watchdog watches its process.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from quire.executors.rank_status import RankStatus, RankStatusPage
from quire.platform.processes import process_state

STACK_SIGNAL = signal.SIGUSR1
"""Signal that makes a rank write its Python stacks to its log."""
CHECK_INTERVAL_S = 0.5
FAILURE_GRACE_S = 5.0
"""Seconds for the other ranks to fail as well, after one has failed a step."""
MAX_STOPPED_S = 2.0
"""A process that was stopped by a signal for so long is not expected to continue."""
STOP_GRACE_S = 5.0
"""Seconds for a rank to end by itself before it is killed."""
STACK_DUMP_S = 0.2
"""Seconds for ranks to write their stacks."""


class WatchedMessage(NamedTuple):
    """A message that not all ranks have answered."""

    number: int
    what: str
    limit_s: float
    is_step: bool  # all ranks run its collectives: one that raises leaves the others waiting


class OtherNodes(Protocol):
    """The nodes beside this one, whose agents watch their ranks. The monitor's thread calls it."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when poll() should be called."""
        ...

    def poll(self) -> str | None:
        """Read what the agents report; copy the status of their ranks to the page.

        Returns why the ranks of a node have failed.
        """
        ...

    def pid(self, rank: int) -> int:
        """Return the process of a rank, as its node counts them."""
        ...

    def write_stacks(self) -> None:
        """Have all ranks write their Python stacks to the logs of their nodes."""
        ...

    def end_ranks(self, reason: str) -> None:
        """Have all ranks killed."""
        ...


class RankMonitor:
    """Watches the ranks of this host that are processes; rank 0 is in the engine's process."""

    def __init__(
        self,
        page: RankStatusPage,
        devices: Sequence[str],
        oldest_message: Callable[[], WatchedMessage | None],
        *,
        first_rank: int = 1,
        nodes: OtherNodes | None = None,
    ) -> None:
        """devices: of all ranks. oldest_message: returns the oldest unanswered message.

        first_rank: of the processes. nodes: None: there are no others, or they are not watched.
        """
        self.processes: list[subprocess.Popen[bytes]] = []
        self.failure: str | None = None
        """Why no rank can run any more."""
        self._first_rank = first_rank
        self._nodes = nodes
        self._page = page
        self._devices = devices
        self._oldest_message = oldest_message
        self._on_failure: list[Callable[[], object]] = []
        self._callback: weakref.WeakMethod[Callable[[], None]] | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._end: WatchedMessage | None = None
        self._wake_fd = os.eventfd(0)
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._checked_at = 0.0
        self._waited: dict[str, float] = {}  # condition -> seconds for which it was true

    def start(self, spawn: Callable[[], list[subprocess.Popen[bytes]]]) -> None:
        """Start the processes. They end with the thread, so it lives as long as they."""
        self._thread = threading.Thread(
            target=self._run, args=(spawn,), name="quire-rank-monitor", daemon=True
        )
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def on_failure(self, action: Callable[[], object]) -> None:
        """Call action() when the ranks have failed."""
        with self._lock:
            self._on_failure.append(action)
            failed = self.failure is not None
        if failed:
            action()

    def set_failure_callback(self, callback: Callable[[], None]) -> None:
        """As on_failure(), for a method of an object that this one may outlive."""
        self._callback = weakref.WeakMethod(callback)
        if self.failure is not None:
            callback()

    def fail(self, reason: str) -> None:
        """End all ranks: no step can run any more. Any thread; the first reason counts."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
            actions = list(self._on_failure)
            if self._thread is not None:
                os.eventfd_write(self._wake_fd, 1)
        for process in self.processes:
            process.kill()
        for action in actions:
            action()
        callback = None if self._callback is None else self._callback()
        if callback is not None:
            callback()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the monitor's thread (garbage collection does)."""
        return self._thread is threading.current_thread()

    def expect_end(self, message: WatchedMessage) -> None:
        """The last message: all ranks must have finished it, and those before, within its limit."""
        self._end = message

    def close(self) -> None:
        """Wait for the processes to end; kill those that do not. Harmless when called again."""
        self._closing = True
        if self._thread is None:
            return
        os.eventfd_write(self._wake_fd, 1)
        if self.is_current_thread:
            return  # garbage collection on this thread: it ends by itself
        self._thread.join()
        with self._lock:
            self._thread = None
            os.close(self._wake_fd)
            self.failure = self.failure or "the engine was shut down"
            self._on_failure.clear()

    def name_rank(self, rank: int) -> str:
        """Return rank, process and device, for messages."""
        if rank == 0:
            pid = os.getpid()
        elif (process := self._process(rank)) is not None:
            pid = process.pid
        else:
            assert self._nodes is not None
            pid = self._nodes.pid(rank)
        return f"rank {rank} (process {pid}, {self._devices[rank]})"

    def _process(self, rank: int) -> subprocess.Popen[bytes] | None:
        """The process of a rank on this host."""
        i = rank - self._first_rank
        return self.processes[i] if 0 <= i < len(self.processes) else None

    # -- on the thread --------------------------------------------------------------------------

    def _run(self, spawn: Callable[[], list[subprocess.Popen[bytes]]]) -> None:
        try:
            self.processes = spawn()
        except BaseException as error:  # noqa: BLE001 - start() raises it
            self._start_error = error
            return
        finally:
            self._started.set()
        try:
            self._watch()
        finally:
            if self.failure is not None and self._nodes is not None:
                self._nodes.end_ranks(self.failure)
            self._reap()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if self._nodes is not None:
            poll.register(self._nodes.fileno(), select.POLLIN)
        pidfds = {os.pidfd_open(one.pid): i for i, one in enumerate(self.processes)}
        try:
            for fd in pidfds:
                poll.register(fd, select.POLLIN)
            self._checked_at = time.monotonic()
            while not self._closing and self.failure is None:
                events = poll.poll(CHECK_INTERVAL_S * 1000)
                if self._closing:
                    return
                ended = [pidfds[fd] for fd, _ in events if fd in pidfds]
                reason = None if self._nodes is None else self._nodes.poll()
                if ended:
                    reason = self._describe_end(ended[0])
                elif reason is None:
                    reason = self._find_fault()
                if reason is not None:
                    self.fail(reason)
        finally:
            for fd in pidfds:
                os.close(fd)

    def _reap(self) -> None:
        deadline = time.monotonic() + (0.0 if self.failure is not None else STOP_GRACE_S)
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _describe_end(self, index: int) -> str:
        rank, status = self._first_rank + index, self.processes[index].wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{self.name_rank(rank)} {how}; {self._describe_progress(rank)}"

    def _describe_progress(self, rank: int) -> str:
        now = self._page.read(rank)
        return (
            f"the last message it began is {now.begun}, the last it finished {now.done}, its last "
            f"collective is number {now.last_collective}"
        )

    def _find_fault(self) -> str | None:
        """Return why the ranks cannot continue."""
        now = time.monotonic()
        # a machine that was suspended, or is overloaded, is no reason to end ranks
        passed = min(now - self._checked_at, 2 * CHECK_INTERVAL_S)
        self._checked_at = now
        statuses = [self._page.read(rank) for rank in range(self._page.ranks)]
        before, self._waited = self._waited, {}

        def lasts(condition: str, limit_s: float) -> bool:
            self._waited[condition] = before.get(condition, 0.0) + passed
            return self._waited[condition] > limit_s

        for rank, process in enumerate(self.processes, self._first_rank):
            stopped = process_state(process.pid) == "T"
            if stopped and lasts(f"rank {rank} is stopped", MAX_STOPPED_S):
                why = f"{self.name_rank(rank)} was stopped by a signal"
                return f"{why}; {self._describe_progress(rank)}"
        if (end := self._end) is not None:
            late = [i for i, one in enumerate(statuses) if max(one.done, one.failed) < end.number]
            if late and lasts("end", end.limit_s):
                return self._describe_hang(end, statuses, late)
        message = self._oldest_message()
        if message is None:
            return None
        number = message.number
        # messages after one that failed fail too, at once
        failed = [rank for rank, one in enumerate(statuses) if one.done < number <= one.failed]
        waiting = [rank for rank, one in enumerate(statuses) if max(one.done, one.failed) < number]
        if message.is_step and failed and waiting and lasts(f"alone {number}", FAILURE_GRACE_S):
            error = self._page.read_error(failed[0])
            return (
                f"{self.name_rank(failed[0])} failed alone in {message.what}: {error}; "
                f"{self.name_rank(waiting[0])} waits for it, {self._describe_progress(waiting[0])}"
            )
        if any(one.preparing_since for one in statuses):
            self._waited[f"late {number}"] = before.get(f"late {number}", 0.0)
        elif max(waiting, default=0) > 0 and lasts(f"late {number}", message.limit_s):
            return self._describe_hang(message, statuses, waiting)
        return None

    def _describe_hang(
        self, message: WatchedMessage, statuses: Sequence[RankStatus], waiting: Sequence[int]
    ) -> str:
        """The rank that is behind the others comes first; its stacks go to the log."""
        for rank in waiting:
            if (process := self._process(rank)) is not None:
                with suppress(OSError):
                    process.send_signal(STACK_SIGNAL)
        if self._nodes is not None:
            self._nodes.write_stacks()
        time.sleep(STACK_DUMP_S)
        now = {rank: statuses[rank] for rank in waiting}
        last, *others = sorted(
            waiting, key=lambda i: (now[i].waits_for_stage, now[i].begun, now[i].collectives, -i)
        )
        why = (
            f"{self.name_rank(last)} has not finished {message.what} after {message.limit_s:.0f} s "
            f"(see --rank-timeout-seconds); {self._describe_progress(last)}"
        )
        return "; ".join(
            [why, *(f"of rank {rank}: {self._describe_progress(rank)}" for rank in others)]
        )
