"""Scheduler: plans each step, and applies its result. No torch, no I/O, no clock.

There is no prefill phase and no decode phase. A sequence has tokens, of which `computed` are in
the cache and `planned` will be after the steps in flight. A step plans more. Prompts, chunks,
prefix hits, forks, drafts and decoding all follow this one rule.

plan(n + 1) may run before apply(n). A token that a step in flight will yield is UNKNOWN in
`tokens` until apply(n) puts the real one there. Rows of sequences that ended or were preempted
meanwhile are stale, and their results are dropped. Blocks freed meanwhile are deferred.

Source: the one rule is that of vLLM V1, sched/scheduler.py, note on the scheduling algorithm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as Seq

from quire.core.admission.request_checks import check_length, check_request
from quire.core.kv.kv_cache import KVCache
from quire.core.scheduler_stats import SchedulerStats as SchedulerStats
from quire.core.scheduling.block_allocation import BlockAllocator, allocate_for_proposals
from quire.core.scheduling.continued_steps import ContinuedSteps, placed_rows
from quire.core.scheduling.drafting import Drafting
from quire.core.scheduling.dummy_step import DUMMY_REQUEST, build_dummy_step, release_dummy_step
from quire.core.scheduling.inflight_steps import InflightStep, InflightSteps
from quire.core.scheduling.limits.base import Admission, StepBudget, StepListener
from quire.core.scheduling.order.base import WaitingQueue
from quire.core.scheduling.outcomes import EnqueueResult, FailedStep
from quire.core.scheduling.plan_builder import PlanBuilder, RankMoves, StepBudgets
from quire.core.scheduling.prompt_logprobs_buffer import PromptLogprobsBuffer
from quire.core.scheduling.replay_state import ReplayState
from quire.core.scheduling.scheduler_counters import SchedulerCounters
from quire.core.scheduling.sequence_registry import SequenceRegistry
from quire.core.scheduling.sequence_starter import SequenceStarter
from quire.core.scheduling.stop_check import StopResult, append_tokens
from quire.core.scheduling.waiting import ResourceProvider, ResourceWaits
from quire.core.types import (
    UNKNOWN,
    DraftCounts,
    Request,
    Row,
    Sequence,
    SequenceState,
    StepPlan,
    StepResult,
    Update,
    Wants,
)
from quire.errors import EngineError, RequestError

log = logging.getLogger(__name__)

MAX_SKIPPED = 64
"""Maximum of waiting sequences that a step skips to start a later one."""

_UPDATE_TAIL = tuple(Update._field_defaults.values())[5:]
"""Default values of the fields of an Update after cached_tokens."""


class Scheduler:
    """Plans steps. It is the only writer of sequences, pools and plans."""

    def __init__(
        self,
        kv: KVCache,
        order: WaitingQueue,
        *,
        budgets: Seq[StepBudget],
        admissions: Seq[Admission] = (),
        listeners: Seq[StepListener] = (),
        resources: Seq[ResourceProvider] = (),
        max_seqs: int,
        max_len: int,
        steps_in_flight: int = 1,
        watermark: float = 0.0,
        drafting: Drafting | None = None,
        dummy_request: Request = DUMMY_REQUEST,
        other_ranks: Seq[KVCache] = (),
    ) -> None:
        """drafting: None: rows have no drafts. dummy_request: of one token, that any step of the
        model can compute. other_ranks: the caches of further data-parallel ranks, as large as
        `kv`; max_seqs is then that of each rank.
        """
        self._kvs = kvs = (kv, *other_ranks)
        self._budgets = StepBudgets(budgets)
        self.admissions, self._listeners = list(admissions), list(listeners)
        self._resources = ResourceWaits(resources)
        self._block_size, self._max_len = kv.block_size, max_len
        self._inflight = InflightSteps(steps_in_flight)
        self._registry = SequenceRegistry(kvs, order, self._inflight, max_seqs)
        self._allocators = [
            BlockAllocator(rank, one, self._registry, self._inflight, watermark)
            for rank, one in enumerate(kvs)
        ]
        self._running, self._waiting_queue = self._registry.running, order
        self._prompt_logprobs, self._counters = PromptLogprobsBuffer(), SchedulerCounters()
        self._starter = SequenceStarter(
            kvs, self._allocators, self._registry, self._inflight, self._prompt_logprobs,
            self._counters,
        )  # fmt: skip
        self._drafting = drafting or Drafting()
        self._continued = ContinuedSteps(kv, self._registry, self._inflight, self._drafting)
        self._measures_step, self._dummy_request = False, dummy_request
        self._planning_failures: list[Update] = []  # of sequences that could not be planned

    # -- requests -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether there is nothing to plan: no sequence runs, or waits in the queue.

        Requests that only hold their blocks do not count, nor those that wait for resources.
        """
        return not self._running and not len(self._waiting_queue)

    @property
    def any_waiting_for_resources(self) -> bool:
        """Whether any request waits for resources."""
        return bool(self._registry.waiting_for_resources)

    @property
    def has_ready(self) -> bool:
        """Whether enqueue_ready() would change anything."""
        return self.any_waiting_for_resources and self._resources.has_results

    def set_ready_callback(self, callback: Callable[[], None]) -> None:
        """Set callback(), which any thread calls whenever has_ready may have become true."""
        self._resources.set_ready_callback(callback)

    def add(self, request: Request) -> Sequence:
        """Queue a request. Returns its first sequence.

        Raises TooLong if it could not finish even with the cache to itself.
        """
        request = check_request(request, self._registry.groups)
        check_length(request, self._kvs[0], self._max_len)
        for admission in self.admissions:
            admission.check_request(request)
        self._resources.check_request(request)
        waits = self._resources.add_request(request)
        added: list[Admission | ResourceWaits] = [self._resources]
        try:
            for admission in self.admissions:
                admission.add_request(request)
                added.append(admission)
            group = self._registry.add_request(request, self._max_len, waits=waits)
            self._drafting.add(request, group.sequences)
        except Exception:
            self._registry.groups.pop(request.id, None)
            for one in added:
                one.remove_request(request)
            raise
        return group.leader

    @property
    def serialize_steps(self) -> bool:
        """Whether each step must be over before the next is planned."""
        return any([one.serialize_steps for one in self._listeners])  # noqa: C419 twice as fast

    @property
    def awaits_result(self) -> bool:
        """Whether the result of the step planned last should be applied before the next is planned,
        if it is in flight: its sequences with drafts could have no row."""
        return self._drafting.awaited == self._inflight.last_step and not self._continued.rows

    def is_waiting_for_resources(self, request_id: str) -> bool:
        """Whether the request waits for resources."""
        group = self._registry.groups.get(request_id)
        return group is not None and group.waits_for_resources

    def enqueue_ready(self) -> EnqueueResult:
        """Queue requests whose resources are ready, and end those that can never run."""
        queued: list[str] = []
        ended: list[Update] = []
        for request_id, error in self._resources.results():
            if error is not None:
                ended += self._fail_never_runnable(request_id, error)
            else:
                self._registry.enqueue_ready(request_id)
                queued.append(request_id)
        return EnqueueResult(queued, ended)

    def fail_request(self, request_id: str, message: str) -> list[Update]:
        """End a request that makes steps raise. Returns the terminal updates of its sequences."""
        self._counters.failed_requests += 1
        ended = self._finish_request(request_id, "error")
        return [one._replace(error=message, fault="step") for one in ended]

    def _fail_never_runnable(
        self, request_id: str, error: RequestError | EngineError
    ) -> list[Update]:
        updates = self._finish_request(request_id, "error")
        if isinstance(error, EngineError):
            return [update._replace(error=str(error)) for update in updates]
        return [
            update._replace(error=str(error), fault="request", param=error.param)
            for update in updates
        ]

    def abort(self, request_id: str) -> list[Update]:
        """End a request and free it. Returns terminal updates of its sequences; [] if unknown."""
        return self._finish_request(request_id, "abort")

    def _finish_request(self, request_id: str, reason: str) -> list[Update]:
        group = self._registry.groups.get(request_id)
        if group is None:
            return []
        updates = [self._finish_with_update(seq, reason) for seq in reversed(group.unfinished)]
        self.release(request_id)
        return updates[::-1]

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence whose text is complete. No update follows; unknown ones are ignored."""
        group = self._registry.groups.get(request_id)
        if group is not None and group.sequences[index].state is not SequenceState.FINISHED:
            self._finish(group.sequences[index])

    def release(self, request_id: str) -> None:
        """Free the blocks of a request made with hold=True. Ignores unknown ones."""
        self._registry.release(request_id)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, without a change, while blocks are in use."""
        if any(kv.pool.available < kv.pool.size for kv in self._kvs):
            return False
        return all(kv.reset() for kv in self._kvs)

    def observe_memory_release(self) -> None:
        """Report to listeners that what the device has beside the weights was given up."""
        for listener in self._listeners:
            listener.observe_memory_release()

    # -- planning -----------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Plan one step. Every plan must go to apply() or fail_step(), in order."""
        step, drafting = self._inflight.next_step, self._drafting
        rows, waiting = len(self._running), len(self._waiting_queue)
        drafting.begin_plan(step, rows, waiting)
        draft = PlanBuilder(self._budgets, rows + waiting, ranks=len(self._kvs))
        places = self._continued.plan_rows(draft)
        self._schedule_running(draft, places)
        if len(draft.short_ranks) < len(self._kvs):
            self._schedule_waiting(draft)
        proposals = drafting.end_plan(len(draft.rows), draft.num_drafts, samples=draft.samples)
        allocate_for_proposals(self._kvs, draft.rows, proposals)
        leaves = self._registry.take_leaves()
        moves = [RankMoves(one, kv.take_copies(step)) for one, kv in zip(leaves, self._kvs)]
        plan = draft.build(step, moves, proposals, places)
        self._inflight.push(plan)
        return plan

    def _schedule_running(self, draft: PlanBuilder, planned: Container[Sequence]) -> None:
        """Give every running sequence its row. planned: those that have one.

        The branch in this loop is the fast path: decoding, with space in the last block, while no
        budget can bind. It does what _schedule_sequence(), the general rule, would do.
        """
        running, size, token = SequenceState.RUNNING, self._block_size, Wants.TOKEN
        new_tuple = tuple.__new__  # makes a Row without the call of its constructor
        rows, slack, ones, drafting = draft.rows, 0, 0, self._drafting
        candidates = draft.candidates(self._running)
        for seq in [one for one in candidates if one not in planned] if planned else candidates:
            tokens, start = seq.tokens, seq.planned
            length = start + 1
            if (
                len(tokens) == length
                and start % size
                and (length < seq.plain_len or drafting.skips(seq))
                and (ones < slack or (not ones and (slack := draft.free_decode_rows())))
                and seq.state is running
            ):
                rows.append(new_tuple(Row, (seq, start, 1, token, 0)))
                tokens.append(UNKNOWN)
                seq.planned = length
                ones += 1
            elif seq.state is running:  # an older sequence may have just preempted it
                draft.take_decode_rows(ones)
                self._schedule_sequence(seq, draft)
                slack = ones = 0  # unknown, until there is another row of one token
        draft.take_decode_rows(ones)

    def _schedule_sequence(self, seq: Sequence, draft: PlanBuilder) -> None:
        at_end = len(seq.tokens) >= seq.max_len and seq.request.pooling is None
        if at_end or not seq.pending:
            return  # its last token, or its pooled result, is in flight
        if seq.row_drafts:
            return  # only the step in flight can determine how many tokens it yields
        decodes = seq.pending == 1 and not self._drafting.skips(seq)
        n = draft.allowed_tokens(seq, self._drafting.choose(seq) if decodes else 0)
        if not n:
            return
        kv = self._kvs[seq.dp_rank]
        if kv.blocks_to_allocate(seq, n) and kv.free_out_of_window(seq, self._inflight.last_step):
            draft.changed_tables.append(seq)
        if not kv.allocate(seq, n):
            n = min(n, seq.pending)  # drafts take no blocks from others
            some = self._allocators[seq.dp_rank].allocate_for_running(
                seq, n, lambda victim: self._preempt(victim, draft)
            )
            n = draft.allowed_tokens(seq, most=some) if 0 < some < n else some
            draft.short_ranks.update(() if some else (seq.dp_rank,))  # none takes what it waits for
        if n:
            draft.add(seq, n)

    def _preempt(self, seq: Sequence, draft: PlanBuilder) -> None:
        draft.remove(seq)
        draft.short_ranks.add(seq.dp_rank)
        self._registry.stop_running(seq)
        self._registry.requeue(seq)
        seq.preemptions += 1
        draft.preempted.append(seq.request.id)
        self._counters.count_preemption(seq)

    def _schedule_waiting(self, draft: PlanBuilder) -> None:
        """Start waiting sequences in order, as long as slots, budgets and blocks suffice."""
        refused: list[Sequence] = []
        if len(self._waiting_queue):
            self._starter.begin_plan(draft.short_ranks)
        while (
            self._registry.has_slot
            and len(self._waiting_queue)
            and not draft.full
            and len(refused) < MAX_SKIPPED
        ):
            seq = self._waiting_queue.pop()
            try:
                if self._starter.start(seq, draft):
                    continue
            except Exception as error:  # noqa: BLE001 isolates an error in one request's data
                self._waiting_queue.requeue(seq)
                self._planning_failures.append(self._fail_sequence(seq, error))
                continue
            refused.append(seq)
            if not draft.may_be_overtaken(seq) and not self._starter.reserve_rank(seq):
                break
        for seq in reversed(refused):
            self._waiting_queue.requeue(seq)

    # -- results ------------------------------------------------------------------------------

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        """Report to listeners how long an applied step took, and its prompt tokens."""
        for listener in self._listeners:
            listener.observe_step(prompt_tokens, seconds)
        if self._measures_step:
            self._drafting.observe_step(prompt_tokens, seconds)

    def apply(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Record what the model generated. Rows of sequences that left meanwhile are dropped.

        The branch in this loop is the fast path: one more token of a decoding sequence, which
        fills no block and ends nothing. It does what _apply_row(), the general rule, would do.
        """
        inflight = self._pop_inflight(plan)
        updates, self._planning_failures = self._planning_failures, []
        slow = self._slow_rows(inflight, result)
        size, wants_token, new_tuple = self._block_size, Wants.TOKEN, tuple.__new__
        for i, (row, ids) in enumerate(zip(placed_rows(plan), result.token_ids, strict=True)):
            seq, start, count, wants, _ = row
            if wants is wants_token and count == 1 == len(ids) and not (slow and i in slow):
                at, token = start + 1, ids[0]
                if at % size and at + 1 < seq.max_len and token not in seq.stop_ids:
                    seq.computed = at
                    seq.tokens[at] = token
                    head = seq.request.id, seq.index, ids, None, None, None, None, seq.cached
                    updates.append(new_tuple(Update, head + _UPDATE_TAIL))
                    continue
            if seq not in inflight.stale:
                try:
                    self._apply_row(i, row, result, updates)
                except Exception as error:  # noqa: BLE001 isolates an error in one row's result
                    updates.append(self._fail_sequence(seq, error))
        self._measures_step = self._drafting.measures(plan)
        if self._measures_step:
            self._drafting.end_result(plan)
        return updates

    def _fail_sequence(self, seq: Sequence, error: Exception) -> Update:
        """End a sequence whose processing raised. Raises if that has broken anything else."""
        log.error("request %s broke its bookkeeping", seq.request.id, exc_info=error)
        assert seq.state is not SequenceState.FINISHED, f"{seq.request.id} broke when it had ended"
        ended = self._finish_with_update(seq, "error", error=f"{type(error).__name__}: {error}")
        self.check()
        return ended

    def fail_step(self, plan: StepPlan) -> FailedStep:
        """Handle a step that raised: its results are dropped, and what it was to copy is lost.

        The device state of every slot is in doubt, so all running sequences return to the queue and
        are recomputed from their tokens, which are unchanged. Limits choose which are tried when.
        """
        copies_lost = [kv.step_failed() for kv in self._kvs]
        inflight = self._pop_inflight(plan)
        rows = [row.seq for row in plan.rows if row.seq not in inflight.stale]
        culprit = None
        for listener in self._listeners:
            listener.observe_device_doubt()
        if rows:
            self._counters.failed_steps += 1
            culprits = [listener.observe_step_failure(rows) for listener in self._listeners]
            culprit = next((one for one in culprits if one is not None), None)
        back = self._registry.requeue_all()
        for rank, lost in enumerate(copies_lost):
            while lost and self._registry.reclaim(rank):
                pass  # sequences that share blocks with those
        return FailedStep([seq.request.id for seq in back], culprit)

    def plan_dummy_step(self) -> StepPlan | None:
        """Plan a step of one token that belongs to no request. None: there are no blocks.

        Call it while no sequence runs and nothing is in flight; finish_dummy_step() must follow.
        """
        assert not self._running, "sequences are running"
        return build_dummy_step(
            self._kvs, self._registry, self._inflight.last_step, self._dummy_request
        )

    def finish_dummy_step(self, plan: StepPlan) -> None:
        """Free what the dummy step used."""
        release_dummy_step(plan, self._kvs, self._registry)

    def replay_state(self) -> ReplayState:
        """Return the object with which replays set the scheduler's state."""
        return ReplayState(self._kvs[0], self._registry, self._inflight, self._drafting)

    def _pop_inflight(self, plan: StepPlan) -> InflightStep:
        inflight = self._inflight.pop_oldest(plan)
        for kv in self._kvs:
            kv.step_finished(plan.step, inflight.stale)
        return inflight

    def _slow_rows(self, inflight: InflightStep, result: StepResult) -> set[int]:
        """Return the rows that have more than one token, or are stale."""
        slow = result.rows_with_extras()
        special = inflight.stale | self._prompt_logprobs.known.keys()
        if special:
            slow.update(i for i, row in enumerate(inflight.plan.rows) if row.seq in special)
        return slow

    def _apply_row(self, i: int, row: Row, result: StepResult, updates: list[Update]) -> None:
        """Apply one live row, whatever it contains."""
        error = result.row_error(i)
        if error is None or len(result.token_ids[i]) > 1:
            self._apply_tokens(i, row, result, updates, faulty=error is not None)
        seq = row.seq
        if error is not None and seq.state is not SequenceState.FINISHED:
            if error.fault == "numbers":
                self._counters.corrupt_rows += 1
                self._kvs[seq.dp_rank].invalidate(seq)
            updates.append(self._finish_with_update(seq, "error")._replace(**error._asdict()))

    def _apply_tokens(
        self, i: int, row: Row, result: StepResult, updates: list[Update], *, faulty: bool
    ) -> None:
        """Apply what a row has computed. faulty: its last token has an error, and is left out."""
        seq, ids = row.seq, result.token_ids[i]
        ids = ids[:-1] if faulty else ids
        if i in result.prompt_logprobs:
            self._prompt_logprobs.add(row, result.prompt_logprobs[i])
        kept, done = self._append_tokens(row, ids)
        self._kvs[seq.dp_rank].cache_full_blocks(seq, row.start)
        self._registry.fork_followers(seq)
        if row.wants is Wants.POOLED:
            self._finish(seq)
            head = seq.request.id, seq.index, (), "stop", None, None, None, seq.cached
            updates.append(Update(*head, pooled=result.pooled[i]))
        elif kept:
            if i in result.drafts:
                self._drafting.set_proposals(seq, result.drafts[i])
            updates.append(self._token_update(i, row, result, ids[:kept], done))
        elif row.wants is Wants.TOKEN and not faulty:
            self._registry.restart_if_overwritten(seq)

    def _append_tokens(self, row: Row, ids: Seq[int]) -> tuple[int, StopResult | None]:
        """Append the accepted tokens of a row, and count what it has computed by their number.

        The KV of drafts that were not accepted is not counted: the next row overwrites it. Without
        any token the last known one is computed again, and later rows in flight, which depend on
        the missing one, become stale.
        """
        seq, known = row.seq, row.start + row.count - row.drafts
        if row.wants is not Wants.TOKEN:
            seq.computed = known
            return 0, None
        ahead = seq.planned - known if ids else 0  # tokens of later rows in flight
        kept, done = append_tokens(seq, known, ids)
        seq.computed = known + min(kept - 1, row.drafts)
        if row.drafts or not kept:
            seq.drafts, seq.row_drafts = (), seq.row_drafts if ahead else 0
            self._drafting.record(seq, row.drafts, max(kept - 1, 0))
        if kept != 1:
            seq.planned = seq.computed + ahead
        if not kept:
            self._inflight.invalidate_rows(seq)
        return kept, done

    def _token_update(
        self, i: int, row: Row, result: StepResult, ids: Seq[int], done: StopResult | None
    ) -> Update:
        """Report `ids`, the tokens of a row that were kept, and end the sequence if it is done."""
        seq, kept, logprobs = row.seq, len(ids), result.logprobs.get(i)
        text_complete = False
        if (
            i in result.finish_reasons
            and kept == len(result.token_ids[i])
            and (done is None or done.token_id is None)
        ):
            done, text_complete = StopResult(result.finish_reasons[i]), ids[-1] not in seq.stop_ids
        scores = logprobs and logprobs[:kept], self._prompt_logprobs.pop(seq), seq.cached
        counts = self._drafting.counts(seq) if row.drafts or done is not None else None
        if done is not None:
            self._finish(seq)
        head = seq.request.id, seq.index, ids, done and done.reason, done and done.token_id
        return Update(*head, *scores, last_token_is_text=text_complete, draft_counts=counts)

    # -- ends and stats ------------------------------------------------------------------------

    def _finish_with_update(self, seq: Sequence, reason: str, error: str | None = None) -> Update:
        counts = self._drafting.counts(seq)
        self._finish(seq)
        head = seq.request.id, seq.index, (), reason, None, None, None, seq.cached
        return Update(*head, error=error, draft_counts=counts)

    def _finish(self, seq: Sequence) -> None:
        """Remove a live sequence from its current place, without an update."""
        request = seq.request
        group = self._registry.groups[request.id]
        self._registry.finish(seq)
        self._drafting.remove(seq)
        self._prompt_logprobs.pop(seq)
        if not group.num_unfinished:
            self._resources.remove_request(request)
            for admission in self.admissions:
                admission.remove_request(request)

    @property
    def available_blocks(self) -> int:
        """Number of blocks that could be allocated now without preemption."""
        return sum([kv.pool.available for kv in self._kvs])

    def extend_keys(self, seq: Sequence) -> None:
        """Extend the block keys of a waiting sequence now, not first when a plan looks at it."""
        self._kvs[0].extend_keys(seq)

    def stats(self) -> SchedulerStats:
        acquitted = sum(one.unattributed_failures for one in self._listeners)
        return self._counters.stats(self._kvs, self._registry, unattributed_failures=acquitted)

    @property
    def draft_counts(self) -> DraftCounts:
        """Drafts that steps verified since the start."""
        return self._drafting.total

    def sequences(self) -> Iterator[Sequence]:
        """Live sequences: running ones in order of admission, waiting ones in the queue or outside,
        and followers of siblings.
        """
        return self._registry.live_sequences()

    def active_request_ids(self, plan: StepPlan | None = None) -> list[str]:
        """Request ids of sequences that run or wait for resources, one per sequence.

        plan: only the requests of its rows, if it has any.
        """
        if plan is not None and plan.rows:
            return [row.seq.request.id for row in plan.rows]
        return [seq.request.id for seq in (*self._running, *self._registry.waiting_for_resources)]

    def limit_stats(self) -> list[object]:
        """Return the stats of resource providers and admissions for a snapshot."""
        return [
            *self._resources.stats(),
            *(one for admission in self.admissions if (one := admission.stats()) is not None),
        ]

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks, each with as many blocks."""
        return len(self._kvs)

    @property
    def max_seqs(self) -> int:
        """Maximum of running sequences."""
        return self._registry.max_seqs

    @property
    def block_size(self) -> int:
        """Number of tokens in a block."""
        return self._block_size

    def block_map(self) -> bytes:
        """Return one BlockState per block of the KV cache, rank by rank, for display."""
        return b"".join([kv.pool.usage_map() for kv in self._kvs])

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler, cache or pools is broken."""
        self._registry.check()
