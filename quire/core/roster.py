"""Where each sequence is, and the moves from one place to another.

    followers, kept out -> queue -> running -> (queue -> running)* -> held -> gone

A live sequence is in exactly one of the first four. The roster decides nothing: the scheduler
says who moves, and the roster keeps slots, shares, families and blocks in step with it. It is the
scheduler's private helper.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.core.family import Family, best_parent
from quire.core.flights import Flights
from quire.core.kv_cache import KVCache
from quire.core.order.base import Order
from quire.core.spare import Spare
from quire.core.types import UNKNOWN, Request, Sequence, State


class Roster:
    """running: in the order of admission. spare: who could do without its blocks. kept: out of the
    queue, until a limit lets it go."""

    def __init__(self, kv: KVCache, order: Order, flights: Flights, max_seqs: int) -> None:
        assert max_seqs > 0, max_seqs
        self.max_seqs = max_seqs
        self._kv = kv
        self._flights = flights
        self._slots = list(range(max_seqs - 1, -1, -1))  # free ones
        self._leaves: list[int] = []
        self.order = order
        self.families: dict[str, Family] = {}
        self.running: dict[Sequence, None] = {}
        self.kept: dict[Sequence, None] = {}
        self.spare = Spare()
        self.followers = 0
        self.swapped = 0

    @property
    def has_slot(self) -> bool:
        return bool(self._slots)

    @property
    def a_slot(self) -> int:
        """One that nobody has: it stays so. The caller says when it is left()."""
        return self._slots[-1]

    def left(self, slot: int) -> None:
        """The device is to empty a slot that nobody has."""
        self._leaves.append(slot)

    def alive(self) -> Iterator[Sequence]:
        """All live sequences, place by place."""
        yield from self.running
        yield from self.order
        yield from self.kept
        for family in self.families.values():
            yield from family.followers

    def take_leaves(self) -> tuple[int, ...]:
        """Slots emptied since the last call."""
        leaves, self._leaves = tuple(self._leaves), []
        return leaves

    # -- coming -------------------------------------------------------------------------------

    def enter(self, request: Request, max_len: int, *, kept: int = 0) -> None:
        """Queue the sequences of a request, or have them follow the first.

        kept: as many limits keep them out of the queue.
        """
        family = Family.of(request, max_len, self._kv.new_tables)
        family.kept = kept
        self.families[request.id] = family
        leader = family.leader
        if request.parent is not None:
            parent, length = best_parent(self.families[request.parent], leader)
            self._fork(parent, leader, length)
            leader.cached = leader.computed
        self._await_turn(leader, kept=kept > 0)
        if family.shared_len:
            self.followers += len(family.followers)
        else:
            followers, family.followers = family.followers, {}
            for seq in followers:
                self._await_turn(seq, kept=kept > 0)

    def _await_turn(self, seq: Sequence, *, kept: bool) -> None:
        if kept:
            self.kept[seq] = None
        else:
            self.order.push(seq)

    def let_go(self, request_id: str) -> bool:
        """A limit keeps a request out no longer. True: none does, and it is in the queue now."""
        family = self.families[request_id]
        family.kept -= 1
        if family.kept:
            return False
        for seq in [seq for seq in family.sequences if seq in self.kept]:
            del self.kept[seq]
            self.order.push(seq)
        return True

    def fork_followers(self, leader: Sequence) -> None:
        """Let the others of a request share its prompt, once that is computed."""
        if leader.request.n == 1:
            return
        family = self.families[leader.request.id]
        if leader is not family.leader or leader.computed < family.shared_len:
            return
        followers, family.followers = family.followers, {}
        self.followers -= len(followers)
        for seq in reversed(followers):
            self._fork(leader, seq, family.shared_len)
            seq.cached = leader.cached
            self.order.put_back(seq)

    def _fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        if length:
            self._kv.fork(parent, child, length)
        if child.tables[0]:
            self.spare.sharing[child] = None

    def seat(self, seq: Sequence) -> None:
        """To a slot, from where it waited: the caller took it out of there."""
        self.swapped -= seq.state is State.SWAPPED
        self.spare.discard(seq)
        seq.state = State.RUNNING
        seq.slot = self._slots.pop()
        self.running[seq] = None

    # -- going --------------------------------------------------------------------------------

    def leave(self, seq: Sequence) -> None:
        """Stop running: empty the slot. Rows in flight mean nothing any more."""
        del self.running[seq]
        self._slots.append(seq.slot)
        self._leaves.append(seq.slot)
        seq.slot = -1
        self._flights.kill(seq)
        while seq.tokens[-1] == UNKNOWN:
            seq.tokens.pop()

    def go_back(self, seq: Sequence, *, swapped: bool) -> None:
        """Wait again after having run. Its blocks are on the host if swapped, else given up."""
        seq.state = State.SWAPPED if swapped else State.WAITING
        self.swapped += swapped
        if not swapped:
            self._kv.release(seq, self._flights.step)
        self.order.put_back(seq)

    def all_go_back(self) -> list[Sequence]:
        """Have all who run wait again, in the order they came in, and begin anew."""
        back = [*self.running]
        for seq in reversed(back):
            self.leave(seq)
            self.go_back(seq, swapped=False)
            seq.preemptions += 1
        return back

    def lose_swap(self, seq: Sequence) -> None:
        """What it has on the host is worth nothing; it begins anew."""
        assert seq.state is State.SWAPPED, seq.state
        self._kv.release(seq, self._flights.step)
        seq.state = State.WAITING
        self.swapped -= 1

    def end(self, seq: Sequence) -> None:
        """Take a live sequence out of wherever it is."""
        family = self.families[seq.request.id]
        held = seq.state is State.RUNNING and family.hold
        if seq.state is State.RUNNING:
            self.leave(seq)
        else:
            self.take_out(seq)
        seq.state = State.FINISHED
        family.left -= 1
        if held:
            self.spare.held[seq] = None
        else:
            self._kv.release(seq, self._flights.step)
        if seq is family.leader and family.followers:
            family.leader = next(iter(family.followers))
            del family.followers[family.leader]
            self.followers -= 1
            if family.kept:
                self.kept[family.leader] = None
            else:
                self.order.put_back(family.leader)
        self._forget_if_over(family)

    def take_out(self, seq: Sequence) -> None:
        """From wherever it waits, its blocks with it; the caller says where to."""
        family = self.families[seq.request.id]
        if seq in family.followers:
            del family.followers[seq]
            self.followers -= 1
            return
        if seq in self.kept:
            del self.kept[seq]
        else:
            self.order.remove(seq)
            self.swapped -= seq.state is State.SWAPPED
        self.spare.discard(seq)

    def release(self, request_id: str) -> None:
        """Hold the blocks of a request no longer than its sequences live."""
        family = self.families.get(request_id)
        if family is None:
            return
        family.hold = False
        for seq in family.sequences:
            if seq.state is State.FINISHED and self.spare.discard(seq):
                self._kv.release(seq, self._flights.step)
        self._forget_if_over(family)

    def reclaim(self, sparing: Sequence | None = None) -> bool:
        """Take blocks from one who could do without. False if there is nobody."""
        seq = self.spare.pop(sparing)
        if seq is None:
            return False
        self._kv.release(seq, self._flights.step)
        return True

    def _forget_if_over(self, family: Family) -> None:
        if not family.hold and not family.left:
            self.families.pop(family.request.id, None)

    # -- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if a sequence is nowhere, in two places, or miscounted."""
        live = [*self.running, *self.order, *self.kept]
        for seq in live:
            known = len(seq.tokens) - seq.tokens.count(UNKNOWN)
            assert 0 <= seq.computed <= seq.planned <= len(seq.tokens), f"{seq}"
            assert seq.computed <= known, f"computed a token nobody knows: {seq}"
            runs = seq in self.running
            assert (seq.state is State.RUNNING) == runs == (seq.slot >= 0), f"misplaced: {seq}"
        taken = [seq.slot for seq in self.running]
        assert len({*taken, *self._slots}) == len(taken) + len(self._slots), "a slot is doubled"
        assert len(taken) + len(self._slots) == self.max_seqs, "a slot is lost"
        assert self.swapped == [seq.state for seq in self.order].count(State.SWAPPED)
        families = self.families.values()
        for family in families:
            out = sum(seq in self.kept for seq in family.sequences)
            assert bool(out) == (family.kept > 0 and family.left > 0), f"{out} kept out: {family}"
        assert self.followers == sum(len(family.followers) for family in families)
        assert all(family.left == len(family.alive) for family in families), "miscounted"
        alive = sum(family.left for family in families)
        assert len(live) + self.followers == alive, f"{alive} live, {len(live)} in their places"
        self._kv.check([*live, *self.spare.held])
