"""Time accounting: attributes the seconds of each sequence, without a gap and without overlap.

Time is cut into periods. The period of a step lasts from the moment the step before was applied (or
from the start of the engine's turn, if none was in flight) to the moment it is applied. Running
sequences are charged with it. Three clocks advance for all:

    _prefill_clock   seconds of steps that went into prompt tokens, divided by tokens
    _overhead_clock  seconds without a step in progress: messages, updates, stalls between steps
    _compile_clock   seconds of steps that waited for kernels and graphs start-up had not prepared

A sequence records them when one of its phases begins and subtracts when it ends. So a decoding row
costs nothing per step; only prompts are visited each step. Used only by the engine's thread. A plan
is recorded when it is made, and counts from the time when the device can start it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Set
from operator import itemgetter
from typing import NamedTuple

from quire.core.accounting.request_timers import (
    PrefillChunk,
    QueueDepth,
    RequestTimerGroup,
    SequencePhase,
    SequenceTimer,
    TimedStep,
)
from quire.core.accounting.step_counters import StepCounters
from quire.core.sequence_timing import SequenceTiming, TimeBreakdown
from quire.core.snapshot import EngineCounters
from quire.core.types import UNKNOWN, Request, Sequence, SequenceState, StepPlan, Update

OVERLAP_THRESHOLD_S = 50e-6
"""If the wait for a step took longer, the step hid what the engine did meanwhile."""

_TIMING = Update._fields.index("timing")
_FINISH = itemgetter(Update._fields.index("finish"))


class StepTiming(NamedTuple):
    """Timing of a step that was applied."""

    prompt_tokens: int
    seconds: float


class TimeAccounting:
    """One per engine. Each accepted sequence is closed by its terminal update, or dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.last_step = StepTiming(0, 0.0)
        self._groups: dict[str, RequestTimerGroup] = {}
        self._timed: set[str] = set()  # requests that need a Timing in every update
        self._inflight: deque[TimedStep] = deque()
        self._prefilling: dict[SequenceTimer, None] = {}  # with prompt tokens not planned yet
        self._preempted: dict[SequenceTimer, None] = {}  # preempted and not running again yet
        self._queue = QueueDepth()
        self._num_running = 0  # sequences
        self._prefill_clock = 0.0
        self._overhead_clock = 0.0
        self._compile_clock = 0.0
        self._stall_s = 0.0  # outside of step() in the current period
        self._entered_at = self._left_at = self._begun_at = self._applied_at = clock()
        self._step_counters = StepCounters()

    # -- requests ----------------------------------------------------------------------------

    def add_request(self, request: Request, *, kept: bool = False) -> None:
        """Start timers for an accepted request. kept: the request waits for resources first."""
        phase = SequencePhase.RESOURCE_WAIT if kept else SequencePhase.QUEUE
        group = self._groups[request.id] = RequestTimerGroup(request, self._clock(), phase)
        group.step_before = self._entered_at, self._left_at
        if not kept:
            self._queue.add(group, self._num_running)
        if request.timed:
            self._timed.add(request.id)

    def mark_queued(self, request_id: str) -> None:
        """End the resource wait of a request: it was outside of the queue until this step."""
        group = self._groups[request_id]
        self._queue.add(group, self._num_running)
        for timer in group.timers:
            if timer is not None:
                self._enter_phase(timer, SequencePhase.QUEUE, self._entered_at)

    def attach_timings(self, updates: list[Update]) -> list[Update]:
        """Put a Timing into each terminal update of sequences that ended now."""
        self._attach_due_timings(updates, self._clock(), frozenset())
        return updates

    def drop_sequence(self, request_id: str, index: int) -> None:
        """Close the timer of a sequence that ends without an update. Ignores one that has ended."""
        group = self._groups.get(request_id)
        timer = None if group is None else group.timers[index]
        if timer is not None:
            self._step_counters.count_finished("stop_string", self._breakdown(timer, self._clock()))
            self._close_timer(request_id, index)

    def accepted_at(self, seq: Sequence) -> float:
        """Return the time when the engine accepted a live sequence."""
        timer = self._groups[seq.request.id].timers[seq.index]
        assert timer is not None, f"{seq.request.id} has ended"
        return timer.accepted_at

    @property
    def num_preempted(self) -> int:
        """Count sequences that were preempted and do not run again yet."""
        return len(self._preempted)

    # -- steps -------------------------------------------------------------------------------

    def enter_step(self) -> None:
        """Start the measurement of a step of the engine loop."""
        self._entered_at = now = self._clock()
        if self._inflight:
            self._stall_s += now - self._left_at
        else:
            self._overhead_clock += now - self._left_at

    def leave_step(self) -> None:
        """End the measurement of a step of the engine loop."""
        self._left_at = self._clock()

    def record_plan(self, plan: StepPlan) -> None:
        """Record a plan that goes to the executor now."""
        preempted = self._mark_preempted(plan.preempted, plan.joins) if plan.preempted else []
        joins = [self._mark_running(seq) for seq in plan.joins] if plan.joins else []
        chunks = self._prefill_chunks() if self._prefilling else []
        tokens = len(plan.rows) - len(chunks) + sum([chunk.tokens for chunk in chunks])
        drafts = plan.num_drafts
        self._inflight.append(TimedStep(joins, preempted, chunks, tokens + drafts, drafts))
        if len(self._inflight) == 1:
            self._begin_period(self._entered_at)

    def record_result(
        self, updates: list[Update], waited: float, compile_s: float = 0.0
    ) -> list[Update]:
        """Attribute the time of the oldest plan, applied after `waited` seconds for its result.

        compile_s: seconds of kernel compilations and graph captures since the result before.
        Terminal updates, first updates and those of timed requests get their Timing.
        """
        now = self._clock()
        timed = self._inflight.popleft()
        stalled = 0.0 if waited > OVERLAP_THRESHOLD_S else self._stall_s
        step = now - self._begun_at - stalled
        self._overhead_clock += stalled
        if compile_s:
            compile_s = min(compile_s, step)  # no more than this step, if it began before
            self._compile_clock += compile_s
            step -= compile_s
        firsts = self._attribute_step(timed, step, now) if timed.chunks else set()
        with_tokens = len(updates) - self._attach_due_timings(updates, now, firsts)
        self.last_step = StepTiming(sum([chunk.tokens for chunk in timed.chunks]), step)
        if timed.tokens:
            self._step_counters.count_step(timed.tokens, step + compile_s, with_tokens)
        if timed.drafts:
            self._count_runs(updates, firsts, now - self._applied_at)
        elif with_tokens > len(firsts):
            self._step_counters.count_inter_token(now - self._applied_at, with_tokens - len(firsts))
        self._applied_at = now
        if self._inflight:
            self._begin_period(now)
        return updates

    def mark_requeued(self, request_ids: Iterable[str]) -> None:
        """Mark requests that are recomputed after a step raised. No step may be in flight."""
        now = self._clock()
        for timer in self._mark_preempted(request_ids):
            self._enter_phase(timer, SequencePhase.PREEMPTED, now)

    def counters(self) -> EngineCounters:
        """Return the totals so far."""
        return self._step_counters.to_counters()

    def check(self, alive: int) -> None:
        """Raise AssertionError unless exactly `alive` timers are open."""
        groups = self._groups.values()
        timers = [timer for group in groups for timer in group.timers if timer is not None]
        assert len(timers) == alive, f"{len(timers)} timers are open for {alive} sequences"
        assert {*self._prefilling, *self._preempted} <= {*timers}, "a closed timer is still used"
        running = sum(timer.seq is not None for timer in timers)
        assert running == self._num_running, f"{running} running, not {self._num_running}"
        queued = sum(group.queued for group in groups)
        assert queued == self._queue.requests, f"{queued} queued, not {self._queue.requests}"

    # -- plans -------------------------------------------------------------------------------

    def _mark_preempted(
        self, request_ids: Iterable[str], joins: Container[Sequence] = ()
    ) -> list[SequenceTimer]:
        """Mark sequences that the new plan has preempted: any of the n of each request.

        joins: sequences that it starts, also again, on another rank.
        """
        preempted: list[SequenceTimer] = []
        for request_id in dict.fromkeys(request_ids):
            for timer in self._groups[request_id].timers:
                if timer is None or timer.seq is None:
                    continue
                if timer.seq.state is not SequenceState.RUNNING or timer.seq in joins:
                    timer.seq = None
                    timer.preemptions += 1
                    self._num_running -= 1
                    self._prefilling.pop(timer, None)
                    self._preempted[timer] = None
                    preempted.append(timer)
        return preempted

    def _mark_running(self, seq: Sequence) -> SequenceTimer:
        timer = self._groups[seq.request.id].timers[seq.index]
        assert timer is not None, f"{seq.request.id} was scheduled after its end"
        timer.seq = seq
        self._num_running += 1
        self._queue.remove(timer.group)
        timer.planned = seq.computed
        self._prefilling[timer] = None
        if self._preempted:
            self._preempted.pop(timer, None)
        return timer

    def _prefill_chunks(self) -> list[PrefillChunk]:
        """Return the prompt chunks in the new plan."""
        chunks: list[PrefillChunk] = []
        for timer in list(self._prefilling):
            seq = timer.seq
            assert seq is not None, "only a running sequence computes a prompt"
            tokens = seq.planned - timer.planned
            if tokens:
                samples = seq.tokens[-1] == UNKNOWN or not seq.pending
                chunks.append(PrefillChunk(timer, tokens, samples))
                timer.planned = seq.planned
                if samples:
                    del self._prefilling[timer]
        return chunks

    # -- periods -----------------------------------------------------------------------------

    def _begin_period(self, now: float) -> None:
        """Start the period of the oldest plan: its preemptions and starts take effect now."""
        self._begun_at = now
        self._stall_s = 0.0
        timed = self._inflight[0]
        for timer in timed.preempted:
            self._enter_phase(timer, SequencePhase.PREEMPTED, now)
        for timer in timed.joins:
            if timer.phase is SequencePhase.PREEMPTED:
                self._enter_phase(timer, SequencePhase.RECOMPUTE, now)
            else:
                self._start_prefill(timer, now)

    def _start_prefill(self, timer: SequenceTimer, now: float) -> None:
        """End its queue phase. The time in which a sibling computed its prompt is its own."""
        done = timer.group.first_prefill_timing
        if done is not None and done.first_token_at is not None:
            timer.breakdown = done.breakdown
            timer.since = done.first_token_at
            timer.prompt_steps = done.prompt_steps
        self._enter_phase(timer, SequencePhase.PREFILL, now)

    def _attribute_step(self, timed: TimedStep, step: float, now: float) -> set[tuple[str, int]]:
        """Attribute a step that computed prompts. Returns the sequences that got a first token."""
        each = step / timed.tokens
        prompts = 0
        for chunk in timed.chunks:
            prompts += chunk.tokens
            chunk.timer.own_prefill_s += each * chunk.tokens
            chunk.timer.prompt_steps += 1
        self._prefill_clock += each * prompts
        self._step_counters.prompt_tokens += prompts
        firsts: set[tuple[str, int]] = set()
        for chunk in timed.chunks:
            timer, seq = chunk.timer, chunk.timer.seq
            if chunk.samples and seq is not None:
                if timer.first_token_at is None and not _has_first_token(seq):
                    self._prefilling[timer] = (
                        None  # the step yielded no token, so the next one computes it again
                    )
                    timer.planned = seq.planned
                    continue
                if timer.first_token_at is None:
                    timer.first_token_at = now
                    if (
                        seq.generation_start == seq.prompt_len
                    ):  # else an earlier engine generated its first token
                        firsts.add((seq.request.id, seq.index))
                    self._count_first(seq, timer, now)
                self._enter_phase(timer, SequencePhase.DECODE, now)
        return firsts

    def _count_runs(
        self, updates: list[Update], firsts: Set[tuple[str, int]], seconds: float
    ) -> None:
        """Count the tokens of a step with drafts: tokens of one row share the time of the step."""
        for update in updates:
            tokens = len(update.token_ids)
            if tokens:
                self._step_counters.count_accepted(tokens - 1)
                if update[:2] not in firsts:
                    self._step_counters.count_inter_token(seconds / tokens, tokens)

    def _count_first(self, seq: Sequence, timer: SequenceTimer, now: float) -> None:
        """Count a first token, except of a request that holds blocks: a round of a larger search.

        Requests that an earlier engine ran before are not counted either.
        """
        counts = not seq.request.hold and not seq.request.resumed_tokens
        if counts:
            self._step_counters.count_first_token(
                now - (seq.request.arrived_at or timer.accepted_at)
            )
        if timer.group.first_prefill_timing is None:
            timer.group.first_prefill_timing = self._timing(timer, now)
            if counts:
                self._step_counters.count_prompt(seq.prompt_len, seq.cached, seq.loaded)

    def _enter_phase(self, timer: SequenceTimer, phase: SequencePhase, now: float) -> None:
        """End the current phase of a sequence, and begin another."""
        timer.breakdown = self._breakdown(timer, now)
        timer.phase = phase
        timer.since = now
        timer.prefill_clock_at_start = self._prefill_clock
        timer.overhead_clock_at_start = self._overhead_clock
        timer.compile_clock_at_start = self._compile_clock
        timer.own_prefill_s = 0.0

    def _breakdown(self, timer: SequenceTimer, now: float) -> TimeBreakdown:
        """Return its seconds up to now: those of finished phases, and of the current one."""
        waited, queue, prefill, others, preempted, decode, outside, compiling = timer.breakdown
        seconds, phase = now - timer.since, timer.phase
        if phase is SequencePhase.QUEUE:
            return (waited, queue + seconds, prefill, others, preempted, decode, outside, compiling)
        if phase is SequencePhase.PREEMPTED:
            return (waited, queue, prefill, others, preempted + seconds, decode, outside, compiling)
        if phase is SequencePhase.RESOURCE_WAIT:
            return (waited + seconds, queue, prefill, others, preempted, decode, outside, compiling)
        prefill_of_others = max(
            self._prefill_clock - timer.prefill_clock_at_start - timer.own_prefill_s, 0.0
        )
        overhead = self._overhead_clock - timer.overhead_clock_at_start
        compiled = self._compile_clock - timer.compile_clock_at_start
        seconds = max(seconds - prefill_of_others - overhead - compiled, 0.0)
        others += prefill_of_others
        outside += overhead
        compiling += compiled
        if phase is SequencePhase.PREFILL:
            prefill += seconds
        elif phase is SequencePhase.DECODE:
            decode += seconds
        else:
            preempted += seconds
        return (waited, queue, prefill, others, preempted, decode, outside, compiling)

    # -- updates -----------------------------------------------------------------------------

    def _attach_due_timings(
        self, updates: list[Update], now: float, firsts: Set[tuple[str, int]]
    ) -> int:
        """Put Timings where they are due, and close timers. Returns the updates without a token."""
        without_token = 0
        for i in self._indices_due(updates, firsts):
            update = updates[i]
            group = self._groups[update.request_id]
            timer = group.timers[update.index]
            assert timer is not None, f"an update of {update.request_id} after its end"
            timing = self._timing(timer, now)
            # an Update with its timing: _replace() takes several times as long
            updates[i] = tuple.__new__(Update, (*update[:_TIMING], timing, *update[_TIMING + 1 :]))
            without_token += not update.token_ids
            if update.finish is not None:
                if update.pooled is not None and timer.seq is not None:
                    seq = timer.seq
                    self._step_counters.count_prompt(seq.prompt_len, seq.cached, seq.loaded)
                self._step_counters.count_finished(update.finish, timing.breakdown)
                self._close_timer(update.request_id, update.index)
        return without_token

    def _indices_due(self, updates: list[Update], firsts: Set[tuple[str, int]]) -> list[int]:
        """Indices of updates that get a Timing. Fast for the usual case, which is none."""
        if self._timed or firsts:
            ids = {request_id for request_id, _ in firsts} | self._timed
            return [
                i
                for i, u in enumerate(updates)
                if u[3] is not None or (u[0] in ids and (u[0] in self._timed or u[:2] in firsts))
            ]
        finishes = [*map(_FINISH, updates)]
        if finishes.count(None) == len(finishes):
            return []
        return [i for i, finish in enumerate(finishes) if finish is not None]

    def _timing(self, timer: SequenceTimer, now: float) -> SequenceTiming:
        cuts = self._breakdown(timer, now)
        return SequenceTiming(
            timer.accepted_at,
            now,
            timer.first_token_at,
            *cuts,
            timer.preemptions,
            queue_at_arrival=timer.group.queue_at_arrival,
            prompt_steps=timer.prompt_steps,
            step_before=timer.group.step_before,
        )

    def _close_timer(self, request_id: str, index: int) -> None:
        group = self._groups[request_id]
        timer = group.timers[index]
        assert timer is not None, f"{request_id} ended twice"
        group.timers[index] = None
        self._num_running -= timer.seq is not None
        timer.seq = None
        self._prefilling.pop(timer, None)
        self._preempted.pop(timer, None)
        group.num_unfinished -= 1
        if not group.num_unfinished:
            self._queue.remove(group)
            del self._groups[request_id]
            self._timed.discard(request_id)


def _has_first_token(seq: Sequence) -> bool:
    """Whether its first token is known: the step that was to generate it may have failed."""
    return len(seq.tokens) > seq.generation_start and seq.tokens[seq.generation_start] != UNKNOWN
