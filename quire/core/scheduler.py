"""Decides, each step, which sequences move and how far. Pure: fakes and a for-loop test it.

There is no prefill phase and no decode phase. A sequence has tokens, of which `computed` are in
the cache and `planned` are promised to be; a step lets it catch up. Prompts, chunks of prompts,
prefix hits, forks and decoding are all this one rule.

plan(n + 1) may run before apply(n). A token a step in flight will say stands as UNKNOWN in
`tokens`; apply(n) puts the real one there. A row whose sequence ended or was preempted meanwhile
is dead, and its result is dropped. Blocks given up meanwhile wait behind a fence.

Source: the one rule is that of vLLM V1, sched/scheduler.py, note on the scheduling algorithm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from quire.core import made_up
from quire.core.admission import check_length, check_request
from quire.core.counts import Counts
from quire.core.draft import Draft
from quire.core.flights import Flight, Flights
from quire.core.kv_cache import KVCache
from quire.core.limits.base import Limit
from quire.core.order.base import Order
from quire.core.prompt_logprobs import PromptLogprobs
from quire.core.resume import Resume
from quire.core.room import Room
from quire.core.roster import Roster
from quire.core.stats import SchedulerStats as SchedulerStats
from quire.core.stop import Finish, say
from quire.core.types import (
    UNKNOWN,
    Request,
    Row,
    Sequence,
    State,
    StepPlan,
    StepResult,
    Update,
)
from quire.errors import EngineError, RequestError

log = logging.getLogger(__name__)

LOOK_PAST = 64
"""How many sequences a step passes over at most, for one behind them."""


class Failed(NamedTuple):
    """What became of a step that raised: who went back to the queue, and who is to blame."""

    back: list[str]
    culprit: str | None


class LetGo(NamedTuple):
    """Requests that a limit had kept out of the queue: who is in it now, and who has ended."""

    queued: list[str]
    ended: list[Update]


class Scheduler:
    """The only one who moves sequences, and so the only writer of them, of pools and of plans."""

    def __init__(
        self,
        kv: KVCache,
        limits: list[Limit],
        order: Order,
        *,
        max_seqs: int,
        max_len: int,
        preemption: Literal["recompute", "swap"] = "recompute",
        steps_in_flight: int = 1,
        watermark: float = 0.0,
    ) -> None:
        self._kv = kv
        self._limits = limits
        self._max_len = max_len
        self._swaps = preemption == "swap"
        self._flights = Flights(steps_in_flight)
        self._roster = Roster(kv, order, self._flights, max_seqs)
        self._room = Room(kv, self._roster, self._flights, watermark)
        self._running = self._roster.running
        self._order = order
        self._prompt_logprobs = PromptLogprobs()
        self._counts = Counts()
        self._lost: list[Update] = []  # of those who could not even be planned

    # -- requests -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """There is nothing to plan: nobody runs, or waits in the queue.

        Requests that only hold their blocks do not count, nor those that a limit keeps out.
        """
        return not self._running and not len(self._order)

    @property
    def keeps(self) -> bool:
        """Somebody is kept out of the queue by a limit."""
        return bool(self._roster.kept)

    @property
    def decided(self) -> bool:
        """let_go() would do something."""
        return self.keeps and any(limit.decided for limit in self._limits)

    def call_when_decided(self, ring: Callable[[], None]) -> None:
        """Have ring() called, by any thread, whenever `decided` may have become true."""
        for limit in self._limits:
            limit.call_when_decided(ring)

    def add(self, request: Request) -> None:
        """Queue a request. Raises TooLong if it could not finish even with the cache to itself."""
        check_request(request, self._roster.families)
        check_length(request, self._kv, self._max_len)
        for limit in self._limits:
            limit.accept(request)
        asked: list[Limit] = []
        kept = 0
        try:
            for limit in self._limits:
                kept += limit.keeps(request)
                asked.append(limit)
            self._roster.enter(request, self._max_len, kept=kept)
        except Exception:
            self._roster.families.pop(request.id, None)
            for limit in asked:
                limit.forget(request)
            raise

    @property
    def careful(self) -> bool:
        """Each step is to be over before the next is planned."""
        return any([limit.careful for limit in self._limits])  # noqa: C419 twice as fast

    def is_kept(self, request_id: str) -> bool:
        """A limit keeps the request out of the queue."""
        family = self._roster.families.get(request_id)
        return family is not None and family.kept > 0

    def let_go(self) -> LetGo:
        """Queue whom no limit keeps out any longer, and end those who can never run."""
        queued: list[str] = []
        ended: list[Update] = []
        for limit in self._limits:
            for request_id, error in limit.verdicts():
                if request_id not in self._roster.families:
                    continue
                if error is not None:
                    ended += self._refuse(request_id, error)
                elif self._roster.let_go(request_id):
                    queued.append(request_id)
        return LetGo(queued, ended)

    def blame(self, request_id: str, message: str) -> list[Update]:
        """End a request that steps fail with. The terminal updates of its sequences."""
        self._counts.blamed += 1
        ended = self._end_all(request_id, "error")
        return [one._replace(error=message, fault="step") for one in ended]

    def _refuse(self, request_id: str, error: RequestError | EngineError) -> list[Update]:
        updates = self._end_all(request_id, "error")
        if isinstance(error, EngineError):
            return [update._replace(error=str(error)) for update in updates]
        return [
            update._replace(error=str(error), fault="request", param=error.param)
            for update in updates
        ]

    def abort(self, request_id: str) -> list[Update]:
        """End a request and release it. The terminal updates of its sequences; [] if unknown."""
        return self._end_all(request_id, "abort")

    def _end_all(self, request_id: str, reason: str) -> list[Update]:
        family = self._roster.families.get(request_id)
        if family is None:
            return []
        updates = [self._ended(seq, reason) for seq in reversed(family.alive)]
        self.release(request_id)
        return updates[::-1]

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence whose text is complete. No update follows; unknown ones are ignored."""
        family = self._roster.families.get(request_id)
        if family is not None and family.sequences[index].state is not State.FINISHED:
            self._end(family.sequences[index])

    def release(self, request_id: str) -> None:
        """Give up the blocks of a request made with hold=True. Unknown ones are ignored."""
        self._roster.release(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing changed, while blocks are in use."""
        return self._kv.pool.forget()

    # -- planning -----------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the work of one step. Every plan must go to apply() or fail(), in order."""
        step = self._flights.next_step
        draft = Draft(self._limits, len(self._running) + len(self._order))
        self._extend_all(draft)
        if not draft.preempted:
            self._admit(draft)
        plan = draft.freeze(step, self._roster.take_leaves())
        self._flights.launch(plan, draft.swapped)
        return plan

    def _extend_all(self, draft: Draft) -> None:
        """Give every running sequence its row.

        The branch in this loop is the fast path: decoding, with room in the last block, while no
        limit can bind. It does what _extend(), the general rule, would do.
        """
        running, size = State.RUNNING, self._kv.block_size
        rows, slack, ones = draft.rows, draft.slack(), 0
        for seq in list(self._running):
            tokens, start = seq.tokens, seq.planned
            length = start + 1
            if (
                len(tokens) == length
                and start % size
                and length < seq.end
                and ones < slack
                and seq.state is running
            ):
                rows.append(Row(seq, start, 1, True))
                tokens.append(UNKNOWN)
                seq.planned = length
                ones += 1
            elif seq.state is running:  # an older one may have preempted it a moment ago
                draft.take_ones(ones)
                self._extend(seq, draft)
                slack, ones = draft.slack(), 0
        draft.take_ones(ones)

    def _extend(self, seq: Sequence, draft: Draft) -> None:
        if len(seq.tokens) >= seq.end:
            return  # its last token is on the way
        n = draft.allowance(seq)
        if not n:
            return
        if self._kv.missing(seq, n) and self._kv.slide(seq, self._flights.step):
            draft.moved.append(seq)
        if not self._kv.grow(seq, n):
            n = self._room.make(seq, n, lambda victim: self._preempt(victim, draft))
        if n:
            draft.add(seq, n)

    def _preempt(self, seq: Sequence, draft: Draft) -> None:
        draft.remove(seq)
        self._roster.leave(seq)
        copies = self._kv.swap_out(seq, self._flights.step) if self._swaps else None
        if copies:
            draft.swap_out += copies
            draft.swapped.append(seq)
        self._roster.go_back(seq, swapped=bool(copies))
        seq.preemptions += 1
        draft.preempted.append(seq.request.id)
        self._counts.preempted(seq)

    def _admit(self, draft: Draft) -> None:
        """Let in who waits, in order, as long as slots, limits and blocks suffice."""
        refused: list[Sequence] = []
        while (
            self._roster.has_slot
            and len(self._order)
            and not draft.full
            and len(refused) < LOOK_PAST
        ):
            seq = self._order.pop()
            try:
                if self._let_in(seq, draft) or (
                    self._room.take_share(seq) and self._let_in(seq, draft)
                ):
                    continue
            except Exception as error:  # noqa: BLE001 a border: what one of them brought along
                self._order.put_back(seq)
                self._lost.append(self._broke(seq, error))
                continue
            refused.append(seq)
            if not draft.passed_over(seq):
                break
        for seq in reversed(refused):
            self._order.put_back(seq)

    def _let_in(self, seq: Sequence, draft: Draft) -> bool:
        """Make one that waits run. False, and nothing changed, if that cannot be."""
        kv = self._kv
        fresh = seq.state is State.WAITING and not seq.tables[0]
        if self._room.still_lacks(seq):
            return False
        if fresh and not self._prompt_logprobs.needs_all(seq):
            kv.match(seq)
        n = draft.allowance(seq)
        if not n or not self._room.suffices(seq):
            if fresh:
                kv.release(seq, 0)
            return False
        if fresh and not seq.preemptions and seq.request.read_prefix_cache:
            seq.cached = seq.computed
            self._counts.query_tokens += len(seq.tokens)
            self._counts.hit_tokens += seq.cached
        self._seat(seq, draft)
        n = min(n, kv.room(seq))
        grown = kv.grow(seq, n)
        assert grown, f"{seq.request.id} was let in without room for {n} tokens"
        draft.add(seq, n)
        self._roster.fork_followers(seq)
        return True

    def _seat(self, seq: Sequence, draft: Draft) -> None:
        """Give it a slot, and blocks of its own for what lies on the host or is shared."""
        step = self._flights.next_step
        if seq.state is State.SWAPPED:
            back = self._kv.swap_in(seq, step)
            assert back is not None, f"{seq.request.id} was let in without room to swap in"
            draft.swap_in += back
        else:
            copies = self._kv.unshare(seq, step)
            assert copies is not None, f"{seq.request.id} was let in without room to unshare"
            draft.copies += copies
        self._roster.seat(seq)
        draft.joins.append(seq)

    # -- results ------------------------------------------------------------------------------

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        """Tell the limits how long a step took that was applied, and what it did of prompts."""
        for limit in self._limits:
            limit.learn(prompt_tokens, seconds)

    def apply(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Record what the model said. Rows of sequences that left meanwhile are dropped.

        The branch in this loop is the fast path: one more token of a decoding sequence, which
        fills no block and ends nothing. It does what _confirm(), the general rule, would do.
        """
        flight = self._land(plan)
        updates, self._lost = self._lost, []
        slow = self._slow_rows(flight, result)
        size = self._kv.block_size
        for i, (row, ids) in enumerate(zip(plan.rows, result.token_ids, strict=True)):
            seq, start, count, samples = row
            if samples and count == 1 == len(ids) and not (slow and i in slow):
                at, token = start + 1, ids[0]
                if at % size and at + 1 < seq.end and token not in seq.stop_ids:
                    seq.computed = at
                    seq.tokens[at] = token
                    updates.append(
                        Update(seq.request.id, seq.index, ids, None, None, None, None, seq.cached)
                    )
                    continue
            if seq not in flight.dead:
                try:
                    self._confirm(i, row, result, updates)
                except Exception as error:  # noqa: BLE001 a border: what came of one of them
                    updates.append(self._broke(seq, error))
        return updates

    def _broke(self, seq: Sequence, error: Exception) -> Update:
        """What was done for one sequence raised: it ends. Raises if it has hurt anything else."""
        log.error("request %s broke its bookkeeping", seq.request.id, exc_info=error)
        assert seq.state is not State.FINISHED, f"{seq.request.id} broke when it had ended"
        ended = self._ended(seq, "error", error=f"{type(error).__name__}: {error}")
        self.check()
        return ended

    def fail(self, plan: StepPlan) -> Failed:
        """A step raised: nothing of it counts, and what it moved to the host is lost.

        What the device has of any slot is in doubt, so all who run go back to the queue: their
        state is made anew from their tokens, which are as they were. Limits say who is tried when.
        """
        flight = self._land(plan)
        for seq in flight.swapped:
            if seq.state is State.SWAPPED:
                self._roster.lose_swap(seq)
        rows = [row.seq for row in plan.rows if row.seq not in flight.dead]
        culprit = None
        if rows:
            self._counts.failed_steps += 1
            found = [limit.failed(rows) for limit in self._limits]
            culprit = next((one for one in found if one is not None), None)
        back = self._roster.all_go_back()
        return Failed([seq.request.id for seq in back], culprit)

    def made_up(self) -> StepPlan | None:
        """A step of one token of nobody's, to see whether steps work. None: there is no room.

        While nobody runs and nothing is in flight; nothing else happens until forget_made_up().
        """
        assert not self._running, "somebody runs"
        return made_up.step(self._kv, self._roster, self._flights.step)

    def forget_made_up(self, plan: StepPlan) -> None:
        """It is over."""
        made_up.forget(plan, self._kv, self._roster)

    def resume(self) -> Resume:
        """What puts it into the middle of things, for replays."""
        return Resume(self._kv, self._roster)

    def _land(self, plan: StepPlan) -> Flight:
        flight = self._flights.land(plan)
        self._kv.landed(plan.step)
        return flight

    def _slow_rows(self, flight: Flight, result: StepResult) -> set[int]:
        """Rows that carry more than a token, or mean nothing any more."""
        slow = result.rows_with_more()
        special = flight.dead | self._prompt_logprobs.known.keys()
        if special:
            slow.update(i for i, row in enumerate(flight.plan.rows) if row.seq in special)
        return slow

    def _confirm(self, i: int, row: Row, result: StepResult, updates: list[Update]) -> None:
        """Record one row that is alive, whatever it carries."""
        seq = row.seq
        if (trouble := result.trouble(i)) is not None:
            if trouble.fault == "numbers":
                self._counts.corrupt_rows += 1
                self._kv.disown(seq)
            updates.append(self._ended(seq, "error")._replace(**trouble._asdict()))
            return
        seq.computed = row.start + row.count
        self._kv.publish(seq, row.start)
        self._roster.fork_followers(seq)
        if i in result.prompt_logprobs:
            self._prompt_logprobs.add(row, result.prompt_logprobs[i])
        if row.samples:
            updates.append(self._say(i, row, result))

    def _say(self, i: int, row: Row, result: StepResult) -> Update:
        """Append the tokens of a row, up to one that ends the sequence."""
        seq = row.seq
        ids, logprobs = result.token_ids[i], result.logprobs.get(i)
        kept, done = say(seq, row.start + row.count, ids)
        whole = False
        if i in result.ends and kept == len(ids) and (done is None or done.token is None):
            done, whole = Finish(result.ends[i]), ids[-1] not in seq.stop_ids
        ids, logprobs = ids[:kept], logprobs and logprobs[:kept]
        prompt_logprobs = self._prompt_logprobs.pop(seq)
        if done is not None:
            self._end(seq)
        return Update(
            seq.request.id,
            seq.index,
            ids,
            done and done.reason,
            done and done.token,
            logprobs,
            prompt_logprobs,
            seq.cached,
            whole=whole,
        )

    # -- ends, and what it tells ---------------------------------------------------------------

    def _ended(self, seq: Sequence, reason: str, error: str | None = None) -> Update:
        self._end(seq)
        return Update(seq.request.id, seq.index, (), reason, cached_tokens=seq.cached, error=error)

    def _end(self, seq: Sequence) -> None:
        """Take a live sequence out of wherever it is. Makes no update."""
        request = seq.request
        family = self._roster.families[request.id]
        self._roster.end(seq)
        self._prompt_logprobs.pop(seq)
        if not family.left:
            for limit in self._limits:
                limit.forget(request)

    @property
    def available(self) -> int:
        """Blocks that could be had now without preempting anybody."""
        return self._kv.pool.available

    def stats(self) -> SchedulerStats:
        acquitted = sum(limit.acquitted for limit in self._limits)
        return self._counts.stats(self._kv, self._roster, failures_of_nobody=acquitted)

    def sequences(self) -> Iterator[Sequence]:
        """Those alive: who runs, in order of admission, who waits, in the queue or kept out of it,
        and who follows a sibling.
        """
        return self._roster.alive()

    def aboard(self, plan: StepPlan | None = None) -> list[str]:
        """Requests of the sequences that run, or that a limit works for: one name for each.

        plan: whom it moves, and nobody else, if it moves any.
        """
        if plan is not None and plan.rows:
            return [row.seq.request.id for row in plan.rows]
        return [seq.request.id for seq in (*self._running, *self._roster.kept)]

    def figures(self) -> list[object]:
        """What limits have to tell a snapshot."""
        return [told for limit in self._limits if (told := limit.figures()) is not None]

    @property
    def max_seqs(self) -> int:
        """Most sequences that run at a time."""
        return self._roster.max_seqs

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._kv.block_size

    def block_map(self) -> bytes:
        """One BlockState per block of the KV cache, for people to look at."""
        return self._kv.pool.usage_map()

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler, cache or pools is broken."""
        self._roster.check()
