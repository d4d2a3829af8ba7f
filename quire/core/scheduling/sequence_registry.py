"""Sequence registry: holds each sequence in one place, and moves it to another.

    followers, waiting for resources -> queue -> running -> (queue -> running)* -> held -> removed

A live sequence is in exactly one of the first four. The scheduler decides which sequences move;
the registry keeps slots, shared blocks and request groups consistent with the moves. Each
data-parallel rank has slots and blocks of its own; the other places are those of all ranks. It is a
private helper of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from quire.core.kv.kv_cache import KVCache
from quire.core.kv.reclaimable_blocks import ReclaimableBlocks
from quire.core.scheduling.inflight_steps import InflightSteps
from quire.core.scheduling.order.base import WaitingQueue
from quire.core.scheduling.request_group import RequestGroup, best_parent
from quire.core.types import UNKNOWN, Request, Sequence, SequenceState


class SequenceRegistry:
    """running: in the order of admission. reclaimable: of each rank, sequences that can lose their
    blocks. waiting_for_resources: sequences outside of the queue until their resources are
    ready."""

    def __init__(
        self, kvs: Seq[KVCache], order: WaitingQueue, inflight: InflightSteps, max_seqs: int
    ) -> None:
        """kvs, max_seqs: of each data-parallel rank."""
        assert max_seqs > 0, max_seqs
        self._max_seqs = max_seqs
        self._kvs = kvs
        self._inflight = inflight
        self._slots = [list(range(max_seqs - 1, -1, -1)) for _ in kvs]  # free ones
        self._leaves: list[list[int]] = [[] for _ in kvs]
        self.waiting_queue = order
        self.groups: dict[str, RequestGroup] = {}
        self.running: dict[Sequence, None] = {}
        self.waiting_for_resources: dict[Sequence, None] = {}
        self.reclaimable = [ReclaimableBlocks() for _ in kvs]
        self.num_followers = 0

    @property
    def max_seqs(self) -> int:
        """Maximum of running sequences, on all ranks."""
        return self._max_seqs * len(self._slots)

    @property
    def has_slot(self) -> bool:
        """Whether any rank has a free slot."""
        return any(self._slots)

    def num_free_slots(self, rank: int) -> int:
        return len(self._slots[rank])

    def num_running(self, rank: int) -> int:
        return self._max_seqs - len(self._slots[rank])

    def running_on(self, rank: int) -> dict[Sequence, None]:
        """The running sequences of a rank, in the order of admission."""
        if len(self._slots) == 1:
            return self.running
        return {seq: None for seq in self.running if seq.dp_rank == rank}

    def unused_slot(self, rank: int) -> int:
        """A free slot, which stays free. The caller passes it to empty_slot() afterwards."""
        return self._slots[rank][-1]

    def empty_slot(self, seq: Sequence) -> None:
        """Have the device empty the slot of a sequence that the registry does not contain."""
        self._leaves[seq.dp_rank].append(seq.slot)

    def live_sequences(self) -> Iterator[Sequence]:
        """All live sequences, place by place."""
        yield from self.running
        yield from self.waiting_queue
        yield from self.waiting_for_resources
        for group in self.groups.values():
            yield from group.followers

    def take_leaves(self) -> list[tuple[int, ...]]:
        """Return the slots of each rank emptied since the last call."""
        taken = [tuple(leaves) for leaves in self._leaves]
        for leaves in self._leaves:
            leaves.clear()
        return taken

    # -- adding -------------------------------------------------------------------------------

    def add_request(self, request: Request, max_len: int, *, waits: bool = False) -> RequestGroup:
        """Queue the sequences of a request, or make them followers of the first.

        waits: they stay out of the queue until enqueue_ready().
        """
        group = RequestGroup.create(request, max_len, self._kvs[0].new_tables)
        group.waits_for_resources = waits
        self.groups[request.id] = group
        leader = group.leader
        if request.parent is not None:
            parent, length = best_parent(self.groups[request.parent], leader)
            self._fork(parent, leader, length)
            leader.cached = leader.computed
        self._enqueue(leader, waits=waits)
        if group.shared_len:
            self.num_followers += len(group.followers)
        else:
            followers, group.followers = group.followers, {}
            for seq in followers:
                self._enqueue(seq, waits=waits)
        return group

    def _enqueue(self, seq: Sequence, *, waits: bool) -> None:
        if waits:
            self.waiting_for_resources[seq] = None
        else:
            self.waiting_queue.push(seq)

    def enqueue_ready(self, request_id: str) -> None:
        """Queue a request whose resources are ready."""
        group = self.groups[request_id]
        group.waits_for_resources = False
        for seq in [seq for seq in group.sequences if seq in self.waiting_for_resources]:
            del self.waiting_for_resources[seq]
            self.waiting_queue.push(seq)

    def fork_followers(self, leader: Sequence) -> None:
        """Fork the other sequences of a request once its prompt is computed."""
        if leader.request.n == 1:
            return
        group = self.groups[leader.request.id]
        if leader is not group.leader or leader.computed < group.shared_len:
            return
        followers, group.followers = group.followers, {}
        self.num_followers -= len(followers)
        for seq in reversed(followers):
            self._fork(leader, seq, group.shared_len)
            seq.cached = leader.cached
            self.waiting_queue.requeue(seq)

    def _fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        if length:
            child.dp_rank = parent.dp_rank
            self._kvs[child.dp_rank].fork(parent, child, length)
        if child.planned:
            self.reclaimable[child.dp_rank].sharing[child] = None

    def start_running(self, seq: Sequence) -> None:
        """Assign a slot of its rank; the caller has removed the sequence from its waiting place."""
        self.reclaimable[seq.dp_rank].discard(seq)
        seq.state = SequenceState.RUNNING
        seq.slot = self._slots[seq.dp_rank].pop()
        self.running[seq] = None

    # -- leaving ------------------------------------------------------------------------------

    def stop_running(self, seq: Sequence) -> None:
        """Stop running: empty the slot. Rows in flight become stale."""
        del self.running[seq]
        self._slots[seq.dp_rank].append(seq.slot)
        self._leaves[seq.dp_rank].append(seq.slot)
        seq.slot = -1
        self._inflight.invalidate_rows(seq)
        while seq.tokens[-1] == UNKNOWN:
            seq.tokens.pop()
        seq.drafts, seq.row_drafts = (), 0

    def requeue(self, seq: Sequence) -> None:
        """Return a running sequence to the queue, without its blocks."""
        seq.state = SequenceState.WAITING
        self.free_blocks(seq)
        self.waiting_queue.requeue(seq)

    def restart_if_overwritten(self, seq: Sequence) -> None:
        """Return a running sequence to the queue whose last token must be computed again, if that
        has changed its recurrent state."""
        if self._kvs[seq.dp_rank].states is not None:
            self.stop_running(seq)
            self.requeue(seq)
            seq.preemptions += 1

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
        group = self.groups[seq.request.id]
        held = seq.state is SequenceState.RUNNING and group.hold
        if seq.state is SequenceState.RUNNING:
            self.stop_running(seq)
        else:
            self.remove_waiting(seq)
        seq.state = SequenceState.FINISHED
        group.num_unfinished -= 1
        if held:
            self.reclaimable[seq.dp_rank].held[seq] = None
        else:
            self.free_blocks(seq)
        if seq is group.leader and group.followers:
            group.leader = next(iter(group.followers))
            del group.followers[group.leader]
            self.num_followers -= 1
            if group.waits_for_resources:
                self.waiting_for_resources[group.leader] = None
            else:
                self.waiting_queue.requeue(group.leader)
        self._drop_if_finished(group)

    def remove_waiting(self, seq: Sequence) -> None:
        """Remove a sequence and its blocks from its waiting place; the caller places it."""
        group = self.groups[seq.request.id]
        if seq in group.followers:
            del group.followers[seq]
            self.num_followers -= 1
            return
        if seq in self.waiting_for_resources:
            del self.waiting_for_resources[seq]
        else:
            self.waiting_queue.remove(seq)
        self.reclaimable[seq.dp_rank].discard(seq)

    def release(self, request_id: str) -> None:
        """Free the blocks of a held request once its sequences have ended."""
        group = self.groups.get(request_id)
        if group is None:
            return
        group.hold = False
        for seq in group.sequences:
            reclaimable = self.reclaimable[seq.dp_rank]
            if seq.state is SequenceState.FINISHED and reclaimable.discard(seq):
                self.free_blocks(seq)
        self._drop_if_finished(group)

    def reclaim(self, rank: int, sparing: Sequence | None = None) -> bool:
        """Free a rank's blocks of one sequence that can lose them. Returns False if there is
        none."""
        seq = self.reclaimable[rank].pop(sparing)
        if seq is None:
            return False
        self.free_blocks(seq)
        return True

    def free_blocks(self, seq: Sequence) -> None:
        """Free all its blocks when the last planned step has finished."""
        self._kvs[seq.dp_rank].release(seq, self._inflight.last_step)

    def _drop_if_finished(self, group: RequestGroup) -> None:
        if not group.hold and not group.num_unfinished:
            self.groups.pop(group.request.id, None)

    # -- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if a sequence is in no place, in two places, or miscounted."""
        live = [*self.running, *self.waiting_queue, *self.waiting_for_resources]
        for seq in live:
            known = len(seq.tokens) - seq.tokens.count(UNKNOWN)
            assert 0 <= seq.computed <= seq.planned <= len(seq.tokens), f"{seq}"
            assert seq.computed <= known, f"computed an unknown token: {seq}"
            runs = seq in self.running
            assert (seq.state is SequenceState.RUNNING) == runs == (seq.slot >= 0), (
                f"misplaced: {seq}"
            )
        for rank, free in enumerate(self._slots):
            used = [seq.slot for seq in self.running if seq.dp_rank == rank]
            assert len({*used, *free}) == len(used) + len(free), "a slot is duplicated"
            assert len(used) + len(free) == self._max_seqs, "a slot is lost"
        groups = self.groups.values()
        for group in groups:
            outside = sum(seq in self.waiting_for_resources for seq in group.sequences)
            assert bool(outside) == (group.waits_for_resources and group.num_unfinished > 0), (
                f"{outside} waiting for resources: {group}"
            )
        assert self.num_followers == sum(len(group.followers) for group in groups)
        assert all(group.num_unfinished == len(group.unfinished) for group in groups), "miscounted"
        live_sequences = sum(group.num_unfinished for group in groups)
        assert len(live) + self.num_followers == live_sequences, (
            f"{live_sequences} live, {len(live)} in their places"
        )
        for rank, kv in enumerate(self._kvs):
            held = self.reclaimable[rank].held
            kv.check([*(seq for seq in live if seq.dp_rank == rank), *held])
            assert all(seq.dp_rank == rank for seq in held), "held on another rank"
