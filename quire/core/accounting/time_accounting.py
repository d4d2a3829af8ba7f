"""Time accounting: attributes the seconds of each sequence, without a gap and without overlap.

Time is cut into periods. The period of a step lasts from the moment the step before was applied (or
from the start of the engine's turn, if none was in flight) to the moment it is applied. Running
sequences are charged with it. Two clocks advance for all:

    _prefill_clock   seconds of steps that went into prompt tokens, divided by tokens
    _overhead_clock  seconds without a step in progress: messages, updates, stalls between steps

A sequence records them when one of its phases begins and subtracts when it ends. So a decoding row
costs nothing per step; only prompts are visited each step. Used only by the engine's thread. A plan
is recorded when it is made, and counts from the time when the device can start it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Set
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
        self._stall_s = 0.0  # outside of step() in the current period
        self._entered_at = self._left_at = self._begun_at = self._applied_at = clock()
        self._step_counters = StepCounters()

    # -- requests ----------------------------------------------------------------------------

    def add_request(self, request: Request, *, kept: bool = False) -> None:
        """Start timers for an accepted request. kept: it waits for resources first."""
        phase = SequencePhase.RESOURCE_WAIT if kept else SequencePhase.QUEUE
        family = self._groups[request.id] = RequestTimerGroup(request, self._clock(), phase)
        family.step_before = self._entered_at, self._left_at
        if not kept:
            self._queue.add(family, self._num_running)
        if request.timed:
            self._timed.add(request.id)

    def mark_queued(self, request_id: str) -> None:
        """End the resource wait of a request: it was outside of the queue until this step."""
        family = self._groups[request_id]
        self._queue.add(family, self._num_running)
        for account in family.timers:
            if account is not None:
                self._enter_phase(account, SequencePhase.QUEUE, self._entered_at)

    def attach_timings(self, updates: list[Update]) -> list[Update]:
        """Put a Timing into each terminal update of sequences that ended now."""
        self._attach_due_timings(updates, self._clock(), frozenset())
        return updates

    def drop_sequence(self, request_id: str, index: int) -> None:
        """Close the timer of a sequence that ends without an update. Ignores one that has ended."""
        family = self._groups.get(request_id)
        account = None if family is None else family.timers[index]
        if account is not None:
            self._step_counters.count_finished(
                "stop_string", self._breakdown(account, self._clock())
            )
            self._close_timer(request_id, index)

    def accepted_at(self, seq: Sequence) -> float:
        """Return the time when the engine accepted a live sequence."""
        account = self._groups[seq.request.id].timers[seq.index]
        assert account is not None, f"{seq.request.id} has ended"
        return account.accepted_at

    @property
    def num_preempted(self) -> int:
        """Count sequences that were preempted and do not run again yet."""
        return len(self._preempted)

    # -- steps -------------------------------------------------------------------------------

    def enter_step(self) -> None:
        """Start to measure a step of the engine loop."""
        self._entered_at = now = self._clock()
        if self._inflight:
            self._stall_s += now - self._left_at
        else:
            self._overhead_clock += now - self._left_at

    def leave_step(self) -> None:
        """Stop to measure a step of the engine loop."""
        self._left_at = self._clock()

    def record_plan(self, plan: StepPlan) -> None:
        """Record a plan that goes to the executor now."""
        put_off = self._mark_preempted(plan.preempted) if plan.preempted else []
        joins = [self._mark_running(seq) for seq in plan.joins] if plan.joins else []
        chunks = self._prefill_chunks() if self._prefilling else []
        tokens = len(plan.rows) - len(chunks) + sum([chunk.tokens for chunk in chunks])
        drafts = plan.num_drafts
        self._inflight.append(TimedStep(joins, put_off, chunks, tokens + drafts, drafts))
        if len(self._inflight) == 1:
            self._begin_period(self._entered_at)

    def record_result(self, updates: list[Update], waited: float) -> list[Update]:
        """Attribute the time of the oldest plan, applied after `waited` seconds for its result.

        Terminal updates, first updates and those of timed requests get their Timing.
        """
        now = self._clock()
        flight = self._inflight.popleft()
        hold_up = 0.0 if waited > OVERLAP_THRESHOLD_S else self._stall_s
        step = now - self._begun_at - hold_up
        self._overhead_clock += hold_up
        firsts = self._attribute_step(flight, step, now) if flight.chunks else set()
        spoken = len(updates) - self._attach_due_timings(updates, now, firsts)
        self.last_step = StepTiming(sum([chunk.tokens for chunk in flight.chunks]), step)
        if flight.tokens:
            self._step_counters.count_step(flight.tokens, step, spoken)
        if flight.drafts:
            self._count_runs(updates, firsts, now - self._applied_at)
        elif spoken > len(firsts):
            self._step_counters.count_inter_token(now - self._applied_at, spoken - len(firsts))
        self._applied_at = now
        if self._inflight:
            self._begin_period(now)
        return updates

    def mark_requeued(self, request_ids: Iterable[str]) -> None:
        """Mark requests that are recomputed after a step raised. No step may be in flight."""
        now = self._clock()
        for account in self._mark_preempted(request_ids):
            self._enter_phase(account, SequencePhase.PREEMPTED, now)

    def counters(self) -> EngineCounters:
        """Return the totals so far."""
        return self._step_counters.to_counters()

    def check(self, alive: int) -> None:
        """Raise AssertionError unless exactly `alive` timers are open."""
        accounts = [a for f in self._groups.values() for a in f.timers if a is not None]
        assert len(accounts) == alive, f"{len(accounts)} accounts of {alive} sequences"
        assert {*self._prefilling, *self._preempted} <= {*accounts}, (
            "an account is closed and still used"
        )
        running = sum(account.seq is not None for account in accounts)
        assert running == self._num_running, f"{running} running, not {self._num_running}"
        mark_queued = sum(family.queued for family in self._groups.values())
        assert mark_queued == self._queue.requests, (
            f"{mark_queued} queued, not {self._queue.requests}"
        )

    # -- plans -------------------------------------------------------------------------------

    def _mark_preempted(self, request_ids: Iterable[str]) -> list[SequenceTimer]:
        """Mark sequences that the new plan has preempted: any of the n of each request."""
        found: list[SequenceTimer] = []
        for request_id in dict.fromkeys(request_ids):
            for account in self._groups[request_id].timers:
                if account is None or account.seq is None:
                    continue
                if account.seq.state is not SequenceState.RUNNING:
                    account.seq = None
                    account.preemptions += 1
                    self._num_running -= 1
                    self._prefilling.pop(account, None)
                    self._preempted[account] = None
                    found.append(account)
        return found

    def _mark_running(self, seq: Sequence) -> SequenceTimer:
        account = self._groups[seq.request.id].timers[seq.index]
        assert account is not None, f"{seq.request.id} was scheduled after its end"
        account.seq = seq
        self._num_running += 1
        self._queue.remove(account.group)
        account.planned = seq.computed
        self._prefilling[account] = None
        if self._preempted:
            self._preempted.pop(account, None)
        return account

    def _prefill_chunks(self) -> list[PrefillChunk]:
        """Return the prompt chunks in the new plan."""
        chunks: list[PrefillChunk] = []
        for account in list(self._prefilling):
            seq = account.seq
            assert seq is not None, "only a running sequence computes a prompt"
            tokens = seq.planned - account.planned
            if tokens:
                samples = seq.tokens[-1] == UNKNOWN or not seq.pending
                chunks.append(PrefillChunk(account, tokens, samples))
                account.planned = seq.planned
                if samples:
                    del self._prefilling[account]
        return chunks

    # -- periods -----------------------------------------------------------------------------

    def _begin_period(self, now: float) -> None:
        """Start the period of the oldest plan: its preemptions and starts take effect now."""
        self._begun_at = now
        self._stall_s = 0.0
        flight = self._inflight[0]
        for account in flight.preempted:
            self._enter_phase(account, SequencePhase.PREEMPTED, now)
        for account in flight.joins:
            if account.phase is SequencePhase.PREEMPTED:
                self._enter_phase(account, SequencePhase.RECOMPUTE, now)
            else:
                self._start_prefill(account, now)

    def _start_prefill(self, account: SequenceTimer, now: float) -> None:
        """End its queue phase. The time in which a sibling computed its prompt is its own."""
        done = account.group.first_prefill_timing
        if done is not None and done.first_token_at is not None:
            account.breakdown = done.breakdown
            account.since = done.first_token_at
            account.prompt_steps = done.prompt_steps
        self._enter_phase(account, SequencePhase.PREFILL, now)

    def _attribute_step(self, flight: TimedStep, step: float, now: float) -> set[tuple[str, int]]:
        """Attribute a step that computed prompts. Returns the sequences that got a first token."""
        each = step / flight.tokens
        prompts = 0
        for chunk in flight.chunks:
            prompts += chunk.tokens
            chunk.timer.own_prefill_s += each * chunk.tokens
            chunk.timer.prompt_steps += 1
        self._prefill_clock += each * prompts
        self._step_counters.prompt_tokens += prompts
        firsts: set[tuple[str, int]] = set()
        for chunk in flight.chunks:
            account, seq = chunk.timer, chunk.timer.seq
            if chunk.samples and seq is not None:
                if account.first_token_at is None and not _has_first_token(seq):
                    self._prefilling[account] = None  # the step yielded no token: once more
                    account.planned = seq.planned
                    continue
                if account.first_token_at is None:
                    account.first_token_at = now
                    if (
                        seq.generation_start == seq.prompt_len
                    ):  # else an earlier engine generated its first token
                        firsts.add((seq.request.id, seq.index))
                    self._count_first(seq, account, now)
                self._enter_phase(account, SequencePhase.DECODE, now)
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

    def _count_first(self, seq: Sequence, account: SequenceTimer, now: float) -> None:
        """Count a first token, except of a request that holds blocks: a round of a larger search.

        Requests that an earlier engine ran before are not counted either.
        """
        counts = not seq.request.hold and not seq.request.resumed_tokens
        if counts:
            self._step_counters.count_first_token(
                now - (seq.request.arrived_at or account.accepted_at)
            )
        if account.group.first_prefill_timing is None:
            account.group.first_prefill_timing = self._timing(account, now)
            if counts:
                self._step_counters.count_prompt(seq.prompt_len, seq.cached, seq.loaded)

    def _enter_phase(self, account: SequenceTimer, phase: SequencePhase, now: float) -> None:
        """End the current phase of a sequence, and begin another."""
        account.breakdown = self._breakdown(account, now)
        account.phase = phase
        account.since = now
        account.prefill_clock_at_start = self._prefill_clock
        account.overhead_clock_at_start = self._overhead_clock
        account.own_prefill_s = 0.0

    def _breakdown(self, account: SequenceTimer, now: float) -> TimeBreakdown:
        """Return its seconds up to now: those of finished phases, and of the current one."""
        kept, queue, prefill, others, num_preempted, decode, outside = account.breakdown
        seconds, phase = now - account.since, account.phase
        if phase is SequencePhase.QUEUE:
            return (kept, queue + seconds, prefill, others, num_preempted, decode, outside)
        if phase is SequencePhase.PREEMPTED:
            return (kept, queue, prefill, others, num_preempted + seconds, decode, outside)
        if phase is SequencePhase.RESOURCE_WAIT:
            return (kept + seconds, queue, prefill, others, num_preempted, decode, outside)
        for_others = max(
            self._prefill_clock - account.prefill_clock_at_start - account.own_prefill_s, 0.0
        )
        not_in_step = self._overhead_clock - account.overhead_clock_at_start
        seconds = max(seconds - for_others - not_in_step, 0.0)
        others += for_others
        outside += not_in_step
        if phase is SequencePhase.PREFILL:
            prefill += seconds
        elif phase is SequencePhase.DECODE:
            decode += seconds
        else:
            num_preempted += seconds
        return (kept, queue, prefill, others, num_preempted, decode, outside)

    # -- updates -----------------------------------------------------------------------------

    def _attach_due_timings(
        self, updates: list[Update], now: float, firsts: Set[tuple[str, int]]
    ) -> int:
        """Put Timings where they are due, and close timers. Returns the updates without a token."""
        silent = 0
        for i in self._indices_due(updates, firsts):
            update = updates[i]
            family = self._groups[update.request_id]
            account = family.timers[update.index]
            assert account is not None, f"an update of {update.request_id} after its end"
            timing = self._timing(account, now)
            updates[i] = update._replace(timing=timing)
            silent += not update.token_ids
            if update.finish is not None:
                self._step_counters.count_finished(update.finish, timing.breakdown)
                self._close_timer(update.request_id, update.index)
        return silent

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

    def _timing(self, account: SequenceTimer, now: float) -> SequenceTiming:
        cuts = self._breakdown(account, now)
        return SequenceTiming(
            account.accepted_at,
            now,
            account.first_token_at,
            *cuts,
            account.preemptions,
            queue_at_arrival=account.group.queue_at_arrival,
            prompt_steps=account.prompt_steps,
            step_before=account.group.step_before,
        )

    def _close_timer(self, request_id: str, index: int) -> None:
        family = self._groups[request_id]
        account = family.timers[index]
        assert account is not None, f"{request_id} ended twice"
        family.timers[index] = None
        self._num_running -= account.seq is not None
        account.seq = None
        self._prefilling.pop(account, None)
        self._preempted.pop(account, None)
        family.num_unfinished -= 1
        if not family.num_unfinished:
            self._queue.remove(family)
            del self._groups[request_id]
            self._timed.discard(request_id)


def _has_first_token(seq: Sequence) -> bool:
    """Whether its first token is known: the step that was to generate it may have failed."""
    return len(seq.tokens) > seq.generation_start and seq.tokens[seq.generation_start] != UNKNOWN
