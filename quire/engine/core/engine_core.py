"""Engine core: runs a scheduler and an executor, one step at a time. Synchronous, on one thread.

Handles tokens only; the caller of step() delivers the updates. With two steps in flight, step()
plans and submits step n + 1 before it waits for step n.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from quire.core.accounting.snapshot_builder import build_snapshot
from quire.core.accounting.time_accounting import TimeAccounting
from quire.core.scheduler_stats import EngineLoad
from quire.core.scheduling.outcomes import FailedStep
from quire.core.scheduling.scheduler import Scheduler, SchedulerStats
from quire.core.snapshot import ExpertBalanceStats, LateWorkCounts, Snapshot
from quire.core.types import Request, StepPlan, Update
from quire.core.types import Sequence as Seq
from quire.engine.core.step_observer import CompositeStepObserver, StepObserver
from quire.errors import EngineDead, EngineError, HookFailed
from quire.executors.base import Executor, StepFuture

log = logging.getLogger(__name__)


class Closeable(Protocol):
    """Has threads or processes of its own."""

    def close(self) -> None: ...


class EngineCore:
    """Owner of the scheduler, and the only caller of its methods."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        steps_in_flight: int = 1,
        check: bool = False,
        background: Sequence[Closeable] = (),
        expert_stats: Callable[[], ExpertBalanceStats] = ExpertBalanceStats,
        machines: Closeable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """background: closed with the engine. expert_stats: of the executor. machines: closed
        last."""
        self._scheduler = scheduler
        self._clock = clock
        self._time_accounting = TimeAccounting(clock)
        self._executor = executor
        self._background = tuple(background)
        self._expert_stats = expert_stats
        self._machines = machines
        self._max_in_flight = steps_in_flight
        self._check = check
        self._in_flight: deque[tuple[StepPlan, StepFuture]] = deque()
        self._running_callback: Callable[[list[str]], None] | None = None
        self._observer = StepObserver()
        self._late_work = LateWorkCounts()  # as far as it was attributed to steps
        self._halted = False  # a step raised: no other may be submitted
        self._was_serialized = False
        self._work_ready = threading.Event()
        self._ready_callback: Callable[[], None] = self._work_ready.set
        self._executor_failed = False
        scheduler.set_ready_callback(self._work_ready.set)
        executor.set_failure_callback(self._on_executor_failure)

    @property
    def idle(self) -> bool:
        """Whether there is no step to plan or in flight. Requests may wait for resources."""
        return self._scheduler.idle and not self._in_flight and not self._scheduler.has_ready

    @property
    def empty(self) -> bool:
        """Whether it is idle without any request."""
        return self.idle and not self._scheduler.any_waiting_for_resources

    def set_ready_callback(self, callback: Callable[[], None]) -> None:
        """Call callback(), from any thread, when an idle engine may have work, as wait() ends."""
        self._ready_callback = callback
        self._scheduler.set_ready_callback(callback)
        if self._executor_failed:
            callback()

    def _on_executor_failure(self) -> None:
        """A rank is lost. Any thread: the engine's thread raises, in its next step, idle or not."""
        self._executor_failed = True
        self._ready_callback()

    def set_running_callback(self, callback: Callable[[list[str]], None]) -> None:
        """Call callback() with the ids of all running requests before each step that may fail."""
        self._running_callback = callback

    def set_observers(self, *observers: StepObserver) -> None:
        """Call these observers from now on."""
        self._observer = CompositeStepObserver(observers)

    def wait(self, seconds: float) -> None:
        """Sleep for so long, or until an idle engine may have work."""
        if self._work_ready.wait(seconds):
            self._work_ready.clear()

    def check_batch(self, requests: Sequence[Request]) -> None:
        """Raise RequestError or Overloaded if the queue has no room for all of them together.

        add() does not check that.
        """
        for admission in self._scheduler.admissions:
            admission.check_batch(requests)

    def add(self, request: Request) -> None:
        """Accept a request. Raises RequestError (TooLong ...), and changes nothing then."""
        seq = self._scheduler.add(request)
        kept = self._scheduler.is_waiting_for_resources(request.id)
        try:
            self._time_accounting.add_request(request, kept=kept)
        except Exception:
            self._scheduler.abort(request.id)
            raise
        self._observer.on_request_added(request, seq, kept=kept)
        if kept and self._running_callback is not None:
            self._running_callback(self._scheduler.active_request_ids())

    def abort(self, request_id: str) -> list[Update]:
        """End a request now. Returns its terminal updates. Unknown ids are ignored."""
        self._observer.on_request_abort(request_id)
        return self._time_accounting.attach_timings(self._scheduler.abort(request_id))

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence: its text is complete (a stop string). No update follows."""
        self._observer.on_sequence_abort(request_id, index)
        self._scheduler.abort_sequence(request_id, index)
        self._time_accounting.drop_sequence(request_id, index)

    def release(self, request_id: str) -> None:
        """Release the blocks of a request that has hold=True."""
        self._observer.on_request_release(request_id)
        self._scheduler.release(request_id)

    def step(self) -> list[Update]:
        """Plan one step, apply the oldest in flight. Each accepted sequence ends in one update.

        Raises EngineDead if steps fail with any request, or a rank is lost.
        """
        if self._executor_failed:
            self._executor.recover()  # raises
        self._time_accounting.enter_step()
        updates = self._apply_admission_changes() if self._scheduler.has_ready else []
        depth = 1 if self._scheduler.serialize_steps else self._max_in_flight
        awaited = bool(self._in_flight) and self._scheduler.awaits_result
        if awaited:
            depth = len(self._in_flight)
        if not self._scheduler.idle and len(self._in_flight) < depth and not self._halted:
            self._submit_step()
        flying = len(self._in_flight)
        if flying >= depth or (flying and (self._scheduler.idle or self._halted)):
            updates += self._apply_oldest()
            if awaited and not (self._in_flight or self._scheduler.idle or self._halted):
                # the device is idle: what the updates are good for can wait
                self._time_accounting.leave_step()
                self._time_accounting.enter_step()
                self._submit_step()
        elif self._in_flight and not self._in_flight[-1][0].rows:
            updates += self._apply_oldest()  # the next plan needs its result
        if self._check:
            self.check()
        self._time_accounting.leave_step()
        return updates

    def drain(self) -> None:
        """Apply steps in flight if all their sequences have ended: they hold blocks until then."""
        while self._in_flight and self._scheduler.idle:
            self._apply_oldest()

    def health_probe_step(self) -> bool:
        """Compute one token of a dummy request in an empty engine, to test the device.

        Returns False if there are requests, or no free block. Raises the error of the step, or
        EngineError.
        """
        self.drain()
        if not self.empty or self._scheduler.stats().held_blocks:
            return False
        return self._run_dummy_step()

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Run function(model) on every rank between steps."""
        return self._executor.apply_model(function)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False if blocks are in use."""
        self.drain()
        if not self._scheduler.reset_prefix_cache():
            return False
        self._observer.on_prefix_cache_reset()
        return True

    def release_kv_memory(self) -> bool:
        """Empty the prefix cache and free the KV memory. Returns False if blocks are in use."""
        if not self.reset_prefix_cache():
            return False
        self._executor.release_kv_memory()
        self._drop_encoded()
        return True

    def reset_encoder_cache(self) -> None:
        """Forget what encoders made of images, video and audio. Running requests encode theirs
        again where they still need them."""
        self.drain()
        self._drop_encoded()

    def _drop_encoded(self) -> None:
        self._scheduler.observe_memory_release()
        self._observer.on_memory_release()

    def mark_ready(self) -> None:
        """Start-up is over: kernel compilations and graph captures are counted from now on."""
        self._executor.call("set_ready", True)

    @property
    def executor(self) -> Executor:
        """The executor of its plans, for callers that make plans themselves."""
        return self._executor

    def extend_keys(self, seq: Seq) -> None:
        """Extend the block keys of a waiting sequence now, not first when a plan looks at it."""
        self._scheduler.extend_keys(seq)

    @property
    def available_blocks(self) -> int:
        """Blocks that could be allocated now without a preemption."""
        return self._scheduler.available_blocks

    @property
    def load(self) -> EngineLoad:
        """What it has to do."""
        loads = (one.load for one in self._scheduler.admissions)
        return next((load for load in loads if load is not None), EngineLoad())

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def snapshot(self, rows: int = 500, blocks: bool = True) -> Snapshot:
        """The current state: at most so many sequences, with or without the block map."""
        return build_snapshot(
            self._scheduler,
            self._time_accounting,
            at=self._clock(),
            most=rows,
            blocks=blocks,
            late_work=self._executor.late_work(),
            experts=self._expert_stats(),
        )

    def snapshots(self) -> list[Snapshot]:
        """The state of each engine: of this one, without sequences and blocks."""
        return [self.snapshot(rows=0, blocks=False)]

    def check(self) -> None:
        """Check the invariants of pool, cache and time accounting. Raises AssertionError."""
        self._scheduler.check()
        self._time_accounting.check(sum(1 for _ in self._scheduler.sequences()))

    def shutdown(self) -> None:
        self._in_flight.clear()
        for one in self._background:
            one.close()
        self._executor.shutdown()
        if self._machines is not None:
            self._machines.close()

    def _apply_admission_changes(self) -> list[Update]:
        queued, ended = self._scheduler.enqueue_ready()
        self._observer.on_admission_change(queued, ended)
        for request_id in queued:
            self._time_accounting.mark_queued(request_id)
        return self._time_accounting.attach_timings(ended)

    def _submit_step(self) -> None:
        """Plan and submit. A plan is in flight from here on whatever happens, Ctrl-C included."""
        if not self._in_flight:
            self._late_work = self._executor.late_work()  # no step waited for what came before
        plan = self._scheduler.plan()
        self._time_accounting.record_plan(plan)
        self._publish_running(plan)
        self._observer.on_step_planned(plan)
        try:
            pending: StepFuture = self._executor.submit(plan)
        except BaseException as error:  # a step's error ends only its own rows
            self._in_flight.append((plan, _FailedSubmission(error)))
            self._halted = True
            if not isinstance(error, Exception):
                raise
        else:
            self._in_flight.append((plan, pending))
        self._observer.on_step_submitted(plan)

    def _apply_oldest(self) -> list[Update]:
        plan, pending = self._in_flight[0]  # an interrupted wait can be repeated
        began = self._clock()
        try:
            result = pending.wait()
        except Exception as error:
            log.exception("step %d failed with %d rows", plan.step, len(plan.rows))
            return self._recover(error, self._clock() - began)
        waited = self._clock() - began
        self._in_flight.popleft()
        updates = self._time_accounting.record_result(
            self._scheduler.apply(plan, result), waited, self._take_late_seconds()
        )
        self._scheduler.observe_step(*self._time_accounting.last_step)
        self._observer.on_step_finished(plan, updates, *self._time_accounting.last_step)
        return updates

    def _take_late_seconds(self) -> float:
        """Return the seconds of late compilations and captures since the last call."""
        now, before = self._executor.late_work(), self._late_work
        if now is before:
            return 0.0
        self._late_work = now
        return max(now.seconds - before.seconds, 0.0)  # counted from 0 when an engine gets ready

    def _publish_running(self, plan: StepPlan) -> None:
        """Publish the running requests if they changed; with serialized steps those of the plan."""
        serialized = self._scheduler.serialize_steps
        if self._running_callback is not None and (
            plan.joins or serialized or self._was_serialized
        ):
            self._running_callback(self._scheduler.active_request_ids(plan if serialized else None))
        self._was_serialized = serialized

    # -- when a step raises ---------------------------------------------------------------------

    def _recover(self, error: Exception, waited: float) -> list[Update]:
        """The oldest step raised: requeue all running requests, and end the culprit once found.

        The scheduler finds it by planning halves of the requests of the failed step alone. Raises
        EngineDead if steps fail with any request.
        """
        self._halted = True
        failed = self._fail_oldest(waited)
        while self._in_flight:  # later steps ran on the state of the failed one
            with suppress(Exception):
                self._in_flight[0][1].wait()
            self._fail_oldest(0.0)
        self._time_accounting.mark_requeued(failed.requeued)
        self._executor.recover()
        self._halted = False
        return [] if failed.culprit is None else self._fail_request(failed.culprit, error)

    def _fail_oldest(self, waited: float) -> FailedStep:
        plan, _ = self._in_flight.popleft()
        failed = self._scheduler.fail_step(plan)
        self._observer.on_step_failed(plan)
        self._time_accounting.record_result([], waited)
        return failed

    def _fail_request(self, culprit: str, error: Exception) -> list[Update]:
        if not isinstance(error, HookFailed):
            self._verify_device()
        message = f"{type(error).__name__}: {error}"
        log.error("request %s ends: steps fail with it alone (%s)", culprit, message)
        self._observer.on_request_failed(culprit, message)
        return self._time_accounting.attach_timings(self._scheduler.fail_request(culprit, message))

    def _verify_device(self) -> None:
        """Run a step of a dummy request. Raises EngineDead if it fails too."""
        try:
            self._run_dummy_step()
        except Exception as error:
            raise EngineDead(f"steps fail with any request: {error}") from error

    def _run_dummy_step(self) -> bool:
        """Run a step of a dummy request, which is not counted and leaves no state.

        Returns False if there is no free block. Raises the error of the step, or EngineError.
        """
        plan = self._scheduler.plan_dummy_step()
        if plan is None:
            return False
        try:
            result = self._executor.submit(plan).wait()
        finally:
            self._scheduler.finish_dummy_step(plan)
        wrong = {**result.errors, **result.request_errors, **result.non_finite}
        if wrong:
            raise EngineError(f"a step of a dummy request failed: {wrong[0]}")
        return True


class _FailedSubmission:
    """The future of a step that could not be submitted."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> Any:
        if isinstance(self._error, Exception):
            raise self._error
        raise EngineError(f"interrupted by {type(self._error).__name__}") from self._error
