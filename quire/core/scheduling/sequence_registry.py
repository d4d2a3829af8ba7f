"""Sequence registry: holds each sequence in one place, and moves it to another.

    followers, waiting for resources -> queue -> running -> (queue -> running)* -> held -> gone

A live sequence is in exactly one of the first four. The scheduler decides which sequences move;
the registry keeps slots, shared blocks and request groups consistent with the moves. It is a
private helper of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.core.kv.kv_cache import KVCache
from quire.core.kv.reclaimable_blocks import ReclaimableBlocks
from quire.core.scheduling.inflight_steps import InflightSteps
from quire.core.scheduling.order.base import WaitingQueue
from quire.core.scheduling.request_group import RequestGroup, best_parent
from quire.core.types import UNKNOWN, Request, Sequence, SequenceState


class SequenceRegistry:
    """running: in the order of admission. reclaimable: sequences that can lose their blocks.
    waiting_for_resources: sequences outside of the queue until their resources are ready."""

    def __init__(
        self, kv: KVCache, order: WaitingQueue, flights: InflightSteps, max_seqs: int
    ) -> None:
        assert max_seqs > 0, max_seqs
        self.max_seqs = max_seqs
        self._kv = kv
        self._inflight = flights
        self._slots = list(range(max_seqs - 1, -1, -1))  # free ones
        self._leaves: list[int] = []
        self.waiting_queue = order
        self.groups: dict[str, RequestGroup] = {}
        self.running: dict[Sequence, None] = {}
        self.waiting_for_resources: dict[Sequence, None] = {}
        self.reclaimable = ReclaimableBlocks()
        self.num_followers = 0

    @property
    def has_slot(self) -> bool:
        return bool(self._slots)

    @property
    def unused_slot(self) -> int:
        """A free slot, which stays free. The caller passes it to empty_slot() afterwards."""
        return self._slots[-1]

    def empty_slot(self, slot: int) -> None:
        """Have the device empty a slot that no sequence has."""
        self._leaves.append(slot)

    def live_sequences(self) -> Iterator[Sequence]:
        """All live sequences, place by place."""
        yield from self.running
        yield from self.waiting_queue
        yield from self.waiting_for_resources
        for family in self.groups.values():
            yield from family.followers

    def take_leaves(self) -> tuple[int, ...]:
        """Return the slots emptied since the last call."""
        leaves, self._leaves = tuple(self._leaves), []
        return leaves

    # -- adding -------------------------------------------------------------------------------

    def add_request(self, request: Request, max_len: int, *, waits: bool = False) -> None:
        """Queue the sequences of a request, or make them followers of the first.

        waits: they stay out of the queue until enqueue_ready().
        """
        family = RequestGroup.create(request, max_len, self._kv.new_tables)
        family.waits_for_resources = waits
        self.groups[request.id] = family
        leader = family.leader
        if request.parent is not None:
            parent, length = best_parent(self.groups[request.parent], leader)
            self._fork(parent, leader, length)
            leader.cached = leader.computed
        self._enqueue(leader, waits=waits)
        if family.shared_len:
            self.num_followers += len(family.followers)
        else:
            num_followers, family.followers = family.followers, {}
            for seq in num_followers:
                self._enqueue(seq, waits=waits)

    def _enqueue(self, seq: Sequence, *, waits: bool) -> None:
        if waits:
            self.waiting_for_resources[seq] = None
        else:
            self.waiting_queue.push(seq)

    def enqueue_ready(self, request_id: str) -> None:
        """Queue a request whose resources are ready."""
        family = self.groups[request_id]
        family.waits_for_resources = False
        for seq in [seq for seq in family.sequences if seq in self.waiting_for_resources]:
            del self.waiting_for_resources[seq]
            self.waiting_queue.push(seq)

    def fork_followers(self, leader: Sequence) -> None:
        """Fork the other sequences of a request once its prompt is computed."""
        if leader.request.n == 1:
            return
        family = self.groups[leader.request.id]
        if leader is not family.leader or leader.computed < family.shared_len:
            return
        num_followers, family.followers = family.followers, {}
        self.num_followers -= len(num_followers)
        for seq in reversed(num_followers):
            self._fork(leader, seq, family.shared_len)
            seq.cached = leader.cached
            self.waiting_queue.requeue(seq)

    def _fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        if length:
            self._kv.fork(parent, child, length)
        if child.tables[0]:
            self.reclaimable.sharing[child] = None

    def start_running(self, seq: Sequence) -> None:
        """Assign a slot to a sequence; the caller has removed it from its waiting place."""
        self.reclaimable.discard(seq)
        seq.state = SequenceState.RUNNING
        seq.slot = self._slots.pop()
        self.running[seq] = None

    # -- leaving ------------------------------------------------------------------------------

    def stop_running(self, seq: Sequence) -> None:
        """Stop running: empty the slot. Rows in flight become stale."""
        del self.running[seq]
        self._slots.append(seq.slot)
        self._leaves.append(seq.slot)
        seq.slot = -1
        self._inflight.invalidate_rows(seq)
        while seq.tokens[-1] == UNKNOWN:
            seq.tokens.pop()
        seq.drafts = ()

    def requeue(self, seq: Sequence) -> None:
        """Return a running sequence to the queue, without its blocks."""
        seq.state = SequenceState.WAITING
        self._kv.release(seq, self._inflight.last_step)
        self.waiting_queue.requeue(seq)

    def requeue_all(self) -> list[Sequence]:
        """Return all running sequences to the queue in order of arrival; they are recomputed."""
        back = [*self.running]
        for seq in reversed(back):
            self.stop_running(seq)
            self.requeue(seq)
            seq.preemptions += 1
        return back

    def finish(self, seq: Sequence) -> None:
        """Remove a live sequence from its current place."""
        family = self.groups[seq.request.id]
        held = seq.state is SequenceState.RUNNING and family.hold
        if seq.state is SequenceState.RUNNING:
            self.stop_running(seq)
        else:
            self.remove_waiting(seq)
        seq.state = SequenceState.FINISHED
        family.num_unfinished -= 1
        if held:
            self.reclaimable.held[seq] = None
        else:
            self._kv.release(seq, self._inflight.last_step)
        if seq is family.leader and family.followers:
            family.leader = next(iter(family.followers))
            del family.followers[family.leader]
            self.num_followers -= 1
            if family.waits_for_resources:
                self.waiting_for_resources[family.leader] = None
            else:
                self.waiting_queue.requeue(family.leader)
        self._drop_if_finished(family)

    def remove_waiting(self, seq: Sequence) -> None:
        """Remove a sequence and its blocks from its waiting place; the caller places it."""
        family = self.groups[seq.request.id]
        if seq in family.followers:
            del family.followers[seq]
            self.num_followers -= 1
            return
        if seq in self.waiting_for_resources:
            del self.waiting_for_resources[seq]
        else:
            self.waiting_queue.remove(seq)
        self.reclaimable.discard(seq)

    def release(self, request_id: str) -> None:
        """Free the blocks of a held request once its sequences have ended."""
        family = self.groups.get(request_id)
        if family is None:
            return
        family.hold = False
        for seq in family.sequences:
            if seq.state is SequenceState.FINISHED and self.reclaimable.discard(seq):
                self._kv.release(seq, self._inflight.last_step)
        self._drop_if_finished(family)

    def reclaim(self, sparing: Sequence | None = None) -> bool:
        """Free the blocks of one sequence that can lose them. Returns False if there is none."""
        seq = self.reclaimable.pop(sparing)
        if seq is None:
            return False
        self._kv.release(seq, self._inflight.last_step)
        return True

    def _drop_if_finished(self, family: RequestGroup) -> None:
        if not family.hold and not family.num_unfinished:
            self.groups.pop(family.request.id, None)

    # -- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if a sequence is nowhere, in two places, or miscounted."""
        live = [*self.running, *self.waiting_queue, *self.waiting_for_resources]
        for seq in live:
            known = len(seq.tokens) - seq.tokens.count(UNKNOWN)
            assert 0 <= seq.computed <= seq.planned <= len(seq.tokens), f"{seq}"
            assert seq.computed <= known, f"computed an unknown token: {seq}"
            runs = seq in self.running
            assert (seq.state is SequenceState.RUNNING) == runs == (seq.slot >= 0), (
                f"misplaced: {seq}"
            )
        taken = [seq.slot for seq in self.running]
        assert len({*taken, *self._slots}) == len(taken) + len(self._slots), "a slot is doubled"
        assert len(taken) + len(self._slots) == self.max_seqs, "a slot is lost"
        groups = self.groups.values()
        for family in groups:
            out = sum(seq in self.waiting_for_resources for seq in family.sequences)
            assert bool(out) == (family.waits_for_resources and family.num_unfinished > 0), (
                f"{out} kept out: {family}"
            )
        assert self.num_followers == sum(len(family.followers) for family in groups)
        assert all(family.num_unfinished == len(family.unfinished) for family in groups), (
            "miscounted"
        )
        live_sequences = sum(family.num_unfinished for family in groups)
        assert len(live) + self.num_followers == live_sequences, (
            f"{live_sequences} live, {len(live)} in their places"
        )
        self._kv.check([*live, *self.reclaimable.held])
