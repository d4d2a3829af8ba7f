"""The engine: scheduler and executor joined, one step at a time. Synchronous, one thread.

Knows tokens only. Text, HTTP and processes are others' business; whoever calls step() hands the
updates on. With steps in flight, step() plans and submits n + 1 before it waits for n.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from quire.core.ledger import Ledger
from quire.core.limits.grammars import Grammars
from quire.core.look import look
from quire.core.scheduler import Failed, Scheduler, SchedulerStats
from quire.core.snapshot import Snapshot
from quire.core.types import Request, StepPlan, Update
from quire.engine.witness import Witness, Witnesses
from quire.errors import EngineDead, EngineError, HookFailed
from quire.executors.base import Executor, Pending

log = logging.getLogger(__name__)


class Engine:
    """Owns the scheduler; the only caller of its methods."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        steps_in_flight: int = 1,
        check: bool = False,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._ledger = Ledger(clock)
        self._executor = executor
        self._grammars = grammars
        self._depth = steps_in_flight
        self._check = check
        self._in_flight: deque[tuple[StepPlan, Pending]] = deque()
        self._boarding: Callable[[list[str]], None] | None = None
        self._witness = Witness()
        self._halted = False  # a step raised, and nothing is to follow it to the device
        self._was_careful = False
        self._decided = threading.Event()
        scheduler.call_when_decided(self._decided.set)

    @property
    def idle(self) -> bool:
        """Nothing to do and nothing under way. Requests may be kept out of the queue."""
        return self._scheduler.idle and not self._in_flight and not self._scheduler.decided

    @property
    def empty(self) -> bool:
        """Nothing to do, nothing under way, and nobody is here."""
        return self.idle and not self._scheduler.keeps

    def call_when_decided(self, ring: Callable[[], None]) -> None:
        """Have ring() called, by any thread, when an idle engine may have become one that is not.

        Without, wait() tells.
        """
        self._scheduler.call_when_decided(ring)

    def call_when_boarding(self, tell: Callable[[list[str]], None]) -> None:
        """Have tell() called when more requests may harm the engine, with the ids of all."""
        self._boarding = tell

    def show(self, *witnesses: Witness) -> None:
        """Have these told of everything from now on."""
        self._witness = Witnesses(witnesses)

    def wait(self, seconds: float) -> None:
        """Sleep for so long, or until an idle engine may have become one that is not."""
        if self._decided.wait(seconds):
            self._decided.clear()

    def add(self, request: Request) -> None:
        """Accept a request. Raises RequestError (TooLong...) and changes nothing if it cannot."""
        self._scheduler.add(request)
        kept = self._scheduler.is_kept(request.id)
        try:
            self._ledger.accept(request, kept=kept)
        except Exception:
            self._scheduler.abort(request.id)
            raise
        self._witness.added(request, kept=kept)
        if kept and self._boarding is not None:
            self._boarding(self._scheduler.aboard())

    def abort(self, request_id: str) -> list[Update]:
        """End a request now; its terminal updates. Unknown ids are ignored: they just ended."""
        self._witness.aborted(request_id)
        return self._ledger.close(self._scheduler.abort(request_id))

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence whose text is complete (a stop string). No update follows."""
        self._witness.ended(request_id, index)
        self._scheduler.abort_sequence(request_id, index)
        self._ledger.drop(request_id, index)

    def release(self, request_id: str) -> None:
        """Give up the blocks of a request that was made with hold=True."""
        self._witness.released(request_id)
        self._scheduler.release(request_id)

    def step(self) -> list[Update]:
        """Plan one step, apply the oldest under way. Each accepted sequence ends in one update.

        Raises EngineDead: steps fail, and no request is to blame.
        """
        self._ledger.enter()
        updates = self._let_go() if self._scheduler.decided else []
        depth = 1 if self._scheduler.careful else self._depth
        if not self._scheduler.idle and len(self._in_flight) < depth and not self._halted:
            self._submit()
        flying = len(self._in_flight)
        if flying >= depth or (flying and (self._scheduler.idle or self._halted)):
            updates += self._apply()
        elif self._in_flight and not self._in_flight[-1][0].rows:
            updates += self._apply()  # nothing could be planned until a result is in
        if self._check:
            self.check()
        self._ledger.leave()
        return updates

    def settle(self) -> None:
        """Wait for steps under way whose sequences have all gone: they keep blocks till then."""
        while self._in_flight and self._scheduler.idle:
            self._apply()

    def canary(self) -> bool:
        """Compute one made-up token as any other, while nobody is here: that proves the device.

        False: there is no room for it now. Raises what the step raised, EngineError.
        """
        self.settle()
        if not self.empty or self._scheduler.stats().held_blocks:
            return False
        return self._try_out()

    def call(self, function: Callable[[Any], Any]) -> list[Any]:
        """Run function(model) on every rank between steps."""
        return self._executor.call(function)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False if blocks are in use."""
        self.settle()
        if not self._scheduler.reset_prefix_cache():
            return False
        self._witness.forgot()
        return True

    def forget_kv(self) -> bool:
        """Forget cached prefixes and give the KV memory back. False if blocks are in use."""
        if not self.reset_prefix_cache():
            return False
        self._executor.forget_kv()
        return True

    @property
    def executor(self) -> Executor:
        """What obeys its plans: for who makes plans of one's own."""
        return self._executor

    @property
    def available(self) -> int:
        """Blocks that could be had now without preempting anybody."""
        return self._scheduler.available

    def prepare(self) -> None:
        """Make now, beside, what would hold steps up when it is first needed. For idle engines."""
        if self._grammars is not None:
            self._grammars.prepare()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def snapshot(self, rows: int = 500, blocks: bool = True) -> Snapshot:
        """The engine as it is now: at most so many sequences, and whether with the block map."""
        return look(self._scheduler, self._ledger, at=self._clock(), most=rows, blocks=blocks)

    def check(self) -> None:
        """Prove the invariants of pool, cache and ledger. Raises AssertionError."""
        self._scheduler.check()
        self._ledger.check(sum(1 for _ in self._scheduler.sequences()))

    def shutdown(self) -> None:
        self._in_flight.clear()
        if self._grammars is not None:
            self._grammars.close()
        self._executor.shutdown()

    def _let_go(self) -> list[Update]:
        queued, ended = self._scheduler.let_go()
        self._witness.let_go(queued, ended)
        for request_id in queued:
            self._ledger.queued(request_id)
        return self._ledger.close(ended)

    def _submit(self) -> None:
        """Plan and submit. What was planned is in flight whatever happens, Ctrl-C included."""
        plan = self._scheduler.plan()
        self._ledger.planned(plan)
        self._board(plan)
        self._witness.planned(plan)
        try:
            pending: Pending = self._executor.submit(plan)
        except BaseException as error:  # the border: a step's fault is its rows' only
            self._in_flight.append((plan, _Failed(error)))
            self._halted = True
            if not isinstance(error, Exception):
                raise
        else:
            self._in_flight.append((plan, pending))
        self._witness.submitted(plan)

    def _apply(self) -> list[Update]:
        plan, pending = self._in_flight[0]  # an interrupted wait can be repeated
        began = self._clock()
        try:
            result = pending.wait()
        except Exception as error:
            log.exception("step %d failed with %d rows", plan.step, len(plan.rows))
            return self._recover(error, self._clock() - began)
        waited = self._clock() - began
        self._in_flight.popleft()
        updates = self._ledger.landed(self._scheduler.apply(plan, result), waited)
        self._scheduler.learn(*self._ledger.last)
        self._witness.landed(plan, updates, *self._ledger.last)
        return updates

    def _board(self, plan: StepPlan) -> None:
        """Tell whom the plan may harm, or who may harm it, if that is others than before."""
        careful = self._scheduler.careful
        if self._boarding is not None and (plan.joins or careful or self._was_careful):
            self._boarding(self._scheduler.aboard(plan if careful else None))
        self._was_careful = careful

    # -- when a step raises ---------------------------------------------------------------------

    def _recover(self, error: Exception, waited: float) -> list[Update]:
        """The oldest step raised: all who run are computed anew, in steps that find the culprit.

        Raises EngineDead if there is no culprit, as steps fail whoever is in them.
        """
        self._halted = True
        failed = self._fail_oldest(waited)
        while self._in_flight:  # of those behind it nothing counts any more either
            with suppress(Exception):
                self._in_flight[0][1].wait()
            self._fail_oldest(0.0)
        self._ledger.put_back(failed.back)
        self._executor.mend()
        self._halted = False
        return [] if failed.culprit is None else self._blame(failed.culprit, error)

    def _fail_oldest(self, waited: float) -> Failed:
        plan, _ = self._in_flight.popleft()
        failed = self._scheduler.fail(plan)
        self._witness.failed(plan, ())
        self._ledger.landed([], waited)
        return failed

    def _blame(self, culprit: str, error: Exception) -> list[Update]:
        if not isinstance(error, HookFailed):
            self._prove()
        message = f"{type(error).__name__}: {error}"
        log.error("request %s is ended: steps fail with it alone (%s)", culprit, message)
        self._witness.blamed(culprit, message)
        return self._ledger.close(self._scheduler.blame(culprit, message))

    def _prove(self) -> None:
        """Make a step that is nobody's. Raises EngineDead if it fails too."""
        try:
            self._try_out()
        except Exception as error:
            raise EngineDead(f"steps fail whoever is in them: {error}") from error

    def _try_out(self) -> bool:
        """Make a step that is nobody's, is in no book, and leaves nothing behind.

        False: there is no room for it. Raises what the step raised, EngineError.
        """
        plan = self._scheduler.made_up()
        if plan is None:
            return False
        try:
            result = self._executor.submit(plan).wait()
        finally:
            self._scheduler.forget_made_up(plan)
        wrong = {**result.errors, **result.refusals, **result.spoilt}
        if wrong:
            raise EngineError(f"a made-up token came to nothing: {wrong[0]}")
        return True


class _Failed:
    """A step that raised before it was under way."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> Any:
        if isinstance(self._error, Exception):
            raise self._error
        raise EngineError(f"interrupted by {type(self._error).__name__}") from self._error
