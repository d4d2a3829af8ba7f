"""Books of time: of each sequence, where its seconds go, without a gap and without overlap.

Time is cut into periods. The period of a step goes from the moment the step before was applied (or
from the moment the engine turned to it, if none was under way) to the moment it is applied. Who is
aboard pays it; who waits, waits. Two clocks run on, whoever is aboard:

    _others   seconds of steps that went into prompt tokens, shared out by tokens
    _outside  seconds in which no step made headway: messages, news, hold-ups between steps

A sequence notes them when a phase of its begins and subtracts when it ends. So a decoding row costs
nothing a step; only prompts are looked at each step, to take their own tokens out of `_others`.

Read by the engine's thread alone, which is the one that tells it what happens. Steps in flight: a
plan is noted when it is made, and counts from when the device can turn to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from operator import itemgetter
from typing import NamedTuple

from quire.core.accounts import Account, Chunk, Family, Flight, Phase, Queue
from quire.core.snapshot import Counters
from quire.core.tally import Tally
from quire.core.timing import Cuts, Timing
from quire.core.types import UNKNOWN, Request, Sequence, State, StepPlan, Update

HIDDEN_S = 50e-6
"""A step that had to be waited for longer than this hid what the engine did meanwhile."""

_FINISH = itemgetter(Update._fields.index("finish"))


class Landing(NamedTuple):
    """A step that was applied."""

    prompt_tokens: int
    seconds: float


class Ledger:
    """One per engine. Every sequence accepted is closed by its terminal update, or dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.last = Landing(0, 0.0)
        self._families: dict[str, Family] = {}
        self._timed: set[str] = set()  # requests whose every update is told
        self._flights: deque[Flight] = deque()
        self._filling: dict[Account, None] = {}  # whose prompts are not planned to the end
        self._out: dict[Account, None] = {}  # who was preempted and has not come back
        self._queue = Queue()
        self._aboard_now = 0  # sequences
        self._others = 0.0
        self._outside = 0.0
        self._hold_up = 0.0  # outside of step() in the period that runs
        self._entered_at = self._left_at = self._begun_at = self._landed_at = clock()
        self._counted = Tally()

    # -- requests ----------------------------------------------------------------------------

    def accept(self, request: Request, *, kept: bool = False) -> None:
        """The engine took it in. kept: it is kept out of the queue, see queued()."""
        phase = Phase.KEPT if kept else Phase.QUEUE
        family = self._families[request.id] = Family(request, self._clock(), phase)
        family.step_before = self._entered_at, self._left_at
        if not kept:
            self._queue.enter(family, self._aboard_now)
        if request.timed:
            self._timed.add(request.id)

    def queued(self, request_id: str) -> None:
        """A request was kept out of the queue until the engine turned to this step."""
        family = self._families[request_id]
        self._queue.enter(family, self._aboard_now)
        for account in family.members:
            if account is not None:
                self._turn(account, Phase.QUEUE, self._entered_at)

    def close(self, updates: list[Update]) -> list[Update]:
        """Put a Timing into each terminal update, of sequences that ended now."""
        self._tell(updates, self._clock(), frozenset())
        return updates

    def drop(self, request_id: str, index: int) -> None:
        """A sequence ends, and no update tells of it. Harmless if it has ended already."""
        family = self._families.get(request_id)
        account = None if family is None else family.members[index]
        if account is not None:
            self._counted.ended("stop_string", self._cuts(account, self._clock()))
            self._forget(request_id, index)

    def accepted_at(self, seq: Sequence) -> float:
        """When the engine took in a sequence that lives."""
        account = self._families[seq.request.id].members[seq.index]
        assert account is not None, f"{seq.request.id} has ended"
        return account.accepted_at

    @property
    def preempted(self) -> int:
        """Sequences that were preempted and have not come back."""
        return len(self._out)

    # -- steps -------------------------------------------------------------------------------

    def enter(self) -> None:
        """The engine turns to a step."""
        self._entered_at = now = self._clock()
        if self._flights:
            self._hold_up += now - self._left_at
        else:
            self._outside += now - self._left_at

    def leave(self) -> None:
        """The engine turns to other things."""
        self._left_at = self._clock()

    def planned(self, plan: StepPlan) -> None:
        """A plan was made, and goes to the executor right now."""
        put_off = self._put_off(plan.preempted) if plan.preempted else []
        joins = [self._aboard(seq) for seq in plan.joins] if plan.joins else []
        chunks = self._chunks() if self._filling else []
        tokens = len(plan.rows) - len(chunks) + sum([chunk.tokens for chunk in chunks])
        self._flights.append(Flight(joins, put_off, chunks, tokens))
        if len(self._flights) == 1:
            self._begin(self._entered_at)

    def landed(self, updates: list[Update], waited: float) -> list[Update]:
        """The oldest plan was applied, after `waited` seconds for its result: what came of it.

        Terminal updates, first ones and those of timed requests get their Timing.
        """
        now = self._clock()
        flight = self._flights.popleft()
        hold_up = 0.0 if waited > HIDDEN_S else self._hold_up
        step = now - self._begun_at - hold_up
        self._outside += hold_up
        firsts = self._share_out(flight, step, now) if flight.chunks else set()
        spoken = len(updates) - self._tell(updates, now, firsts)
        self.last = Landing(sum([chunk.tokens for chunk in flight.chunks]), step)
        if flight.tokens:
            self._counted.step(flight.tokens, step, spoken)
        if spoken > len(firsts):
            self._counted.inter_token(now - self._landed_at, spoken - len(firsts))
        self._landed_at = now
        if self._flights:
            self._begin(now)
        return updates

    def put_back(self, request_ids: Iterable[str]) -> None:
        """A step raised, and these are to be computed anew. After landed(), of all in flight."""
        now = self._clock()
        for account in self._put_off(request_ids):
            self._turn(account, Phase.OUT, now)

    def counters(self) -> Counters:
        """What was counted so far."""
        return self._counted.counters()

    def check(self, alive: int) -> None:
        """Raise AssertionError unless so many accounts are open."""
        accounts = [a for f in self._families.values() for a in f.members if a is not None]
        assert len(accounts) == alive, f"{len(accounts)} accounts of {alive} sequences"
        assert {*self._filling, *self._out} <= {*accounts}, "an account is closed and still used"
        aboard = sum(account.seq is not None for account in accounts)
        assert aboard == self._aboard_now, f"{aboard} aboard, not {self._aboard_now}"
        queued = sum(family.queued for family in self._families.values())
        assert queued == self._queue.requests, f"{queued} queued, not {self._queue.requests}"

    # -- plans -------------------------------------------------------------------------------

    def _put_off(self, request_ids: Iterable[str]) -> list[Account]:
        """Whom the plan just made has preempted. Of a request's n it may be any."""
        found: list[Account] = []
        for request_id in dict.fromkeys(request_ids):
            for account in self._families[request_id].members:
                if account is None or account.seq is None:
                    continue
                if account.seq.state is not State.RUNNING:
                    account.seq = None
                    account.preemptions += 1
                    self._aboard_now -= 1
                    self._filling.pop(account, None)
                    self._out[account] = None
                    found.append(account)
        return found

    def _aboard(self, seq: Sequence) -> Account:
        account = self._families[seq.request.id].members[seq.index]
        assert account is not None, f"{seq.request.id} came aboard after its end"
        account.seq = seq
        self._aboard_now += 1
        self._queue.leave(account.family)
        account.planned = seq.computed
        self._filling[account] = None
        if self._out:
            self._out.pop(account, None)
        return account

    def _chunks(self) -> list[Chunk]:
        """What the plan just made computes of prompts."""
        chunks: list[Chunk] = []
        for account in list(self._filling):
            seq = account.seq
            assert seq is not None, "only who is aboard computes a prompt"
            tokens = seq.planned - account.planned
            if tokens:
                samples = seq.tokens[-1] == UNKNOWN
                chunks.append(Chunk(account, tokens, samples))
                account.planned = seq.planned
                if samples:
                    del self._filling[account]
        return chunks

    # -- periods -----------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """The device can turn to the oldest plan: who it put off is out, who joins is aboard."""
        self._begun_at = now
        self._hold_up = 0.0
        flight = self._flights[0]
        for account in flight.put_off:
            self._turn(account, Phase.OUT, now)
        for account in flight.joins:
            if account.phase is Phase.OUT:
                self._turn(account, Phase.REBUILD, now)
            else:
                self._start(account, now)

    def _start(self, account: Account, now: float) -> None:
        """Its queue is over. What a sibling computed for it is time of its own, and no queue."""
        done = account.family.prompt_done
        if done is not None and done.first_token_at is not None:
            account.cuts = done.cuts
            account.since = done.first_token_at
            account.prompt_steps = done.prompt_steps
        self._turn(account, Phase.PREFILL, now)

    def _share_out(self, flight: Flight, step: float, now: float) -> set[tuple[str, int]]:
        """Book a step that computed prompts. Who got a first token by it."""
        each = step / flight.tokens
        prompts = 0
        for chunk in flight.chunks:
            prompts += chunk.tokens
            chunk.account.own += each * chunk.tokens
            chunk.account.prompt_steps += 1
        self._others += each * prompts
        self._counted.prompt_tokens += prompts
        firsts: set[tuple[str, int]] = set()
        for chunk in flight.chunks:
            account, seq = chunk.account, chunk.account.seq
            if chunk.samples and seq is not None:
                if account.first_token_at is None and _has_spoken(seq):
                    account.first_token_at = now
                    if seq.first == seq.prompt_len:  # else it spoke in another engine before
                        firsts.add((seq.request.id, seq.index))
                    self._count_first(seq, account, now)
                self._turn(account, Phase.DECODE, now)
        return firsts

    def _count_first(self, seq: Sequence, account: Account, now: float) -> None:
        """Count a first token, unless it is of a round of a larger search, which holds blocks.

        Nor of a request that was in another engine before.
        """
        counts = not seq.request.hold and not seq.request.spoken
        if counts:
            self._counted.first_token(now - (seq.request.arrived_at or account.accepted_at))
        if account.family.prompt_done is None:
            account.family.prompt_done = self._timing(account, now)
            if counts:
                self._counted.prompt(seq.prompt_len, seq.cached)

    def _turn(self, account: Account, phase: Phase, now: float) -> None:
        """End the phase it is in, and begin another."""
        account.cuts = self._cuts(account, now)
        account.phase = phase
        account.since = now
        account.others = self._others
        account.outside = self._outside
        account.own = 0.0

    def _cuts(self, account: Account, now: float) -> Cuts:
        """Its seconds up to now: those of phases that are over, and of the one it is in."""
        kept, queue, prefill, others, preempted, decode, outside = account.cuts
        seconds, phase = now - account.since, account.phase
        if phase is Phase.QUEUE:
            return (kept, queue + seconds, prefill, others, preempted, decode, outside)
        if phase is Phase.OUT:
            return (kept, queue, prefill, others, preempted + seconds, decode, outside)
        if phase is Phase.KEPT:
            return (kept + seconds, queue, prefill, others, preempted, decode, outside)
        for_others = max(self._others - account.others - account.own, 0.0)
        not_in_step = self._outside - account.outside
        seconds = max(seconds - for_others - not_in_step, 0.0)
        others += for_others
        outside += not_in_step
        if phase is Phase.PREFILL:
            prefill += seconds
        elif phase is Phase.DECODE:
            decode += seconds
        else:
            preempted += seconds
        return (kept, queue, prefill, others, preempted, decode, outside)

    # -- telling -----------------------------------------------------------------------------

    def _tell(self, updates: list[Update], now: float, firsts: Set[tuple[str, int]]) -> int:
        """Put in Timings where they are due, and close accounts. How many updates had no token."""
        silent = 0
        for i in self._due(updates, firsts):
            update = updates[i]
            family = self._families[update.request_id]
            account = family.members[update.index]
            assert account is not None, f"an update of {update.request_id} after its end"
            timing = self._timing(account, now)
            updates[i] = update._replace(timing=timing)
            silent += not update.token_ids
            if update.finish is not None:
                self._counted.ended(update.finish, timing.cuts)
                self._forget(update.request_id, update.index)
        return silent

    def _due(self, updates: list[Update], firsts: Set[tuple[str, int]]) -> list[int]:
        """Places of the updates that get a Timing. Mostly there are none, so that is fast."""
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

    def _timing(self, account: Account, now: float) -> Timing:
        cuts = self._cuts(account, now)
        return Timing(
            account.accepted_at,
            now,
            account.first_token_at,
            *cuts,
            account.preemptions,
            behind=account.family.behind,
            prompt_steps=account.prompt_steps,
            step_before=account.family.step_before,
        )

    def _forget(self, request_id: str, index: int) -> None:
        family = self._families[request_id]
        account = family.members[index]
        assert account is not None, f"{request_id} ended twice"
        family.members[index] = None
        self._aboard_now -= account.seq is not None
        account.seq = None
        self._filling.pop(account, None)
        self._out.pop(account, None)
        family.left -= 1
        if not family.left:
            self._queue.leave(family)
            del self._families[request_id]
            self._timed.discard(request_id)


def _has_spoken(seq: Sequence) -> bool:
    """Its first token is known: the step that was to say it may have failed."""
    return len(seq.tokens) > seq.first and seq.tokens[seq.first] != UNKNOWN
