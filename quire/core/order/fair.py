"""Whose turn it is goes by who had least: tenants that wait get equal service, by their weights.

Service is counted in tokens: one for a token of a prompt that was computed (what the prefix cache
had is free), OUTPUT_COST for one that was generated, divided by the tenant's weight. Who had least
of those who wait goes next; within a tenant another order decides. Who comes back from idleness
starts level with those who wait: no credit for the past, and what it had too much stays. When
memory runs out, whoever holds most gives way. With one tenant all of this is the inner order.

Source: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024 (virtual token counter);
the victim and the uncached price are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from quire.core.order.base import Order
from quire.core.types import NO_BLOCK, Sequence, State

OUTPUT_COST = 2.0
"""A generated token takes a row of a step for itself; tokens of prompts share theirs."""
MANY = 4096
"""Tenants beyond which those with nothing here are forgotten."""


class _Tenant:
    """queue: who waits. spent: the virtual counter."""

    __slots__ = ("queue", "spent", "weight")

    def __init__(self, queue: Order) -> None:
        self.queue = queue
        self.spent = 0.0
        self.weight = 1.0


class _Bill:
    """Of one sequence that had a turn. paid: may be ahead of what it had, just after pop()."""

    __slots__ = ("base", "had", "paid")

    def __init__(self, base: int) -> None:
        self.base = base  # leading tokens that others computed for it
        self.had = 0.0
        self.paid = 0.0


class Fair:
    """inner: makes the order within a tenant."""

    def __init__(self, inner: Callable[[], Order]) -> None:
        self._inner = inner
        self._chooses = inner()  # of victims; its queue stays empty
        self._barred: frozenset[bytes] = frozenset()
        self._tenants: dict[bytes, _Tenant] = {}
        self._waiting: dict[bytes, _Tenant] = {}  # those with a queue that is not empty
        self._bills: dict[Sequence, _Bill] = {}
        self._level = 0.0  # what the last one had spent who had a turn

    def __len__(self) -> int:
        return sum([len(one.queue) for one in self._waiting.values()])

    def __iter__(self) -> Iterator[Sequence]:
        if len(self._waiting) < 2:
            for one in self._waiting.values():
                yield from one.queue
            return
        rest = {name: iter(one.queue) for name, one in self._waiting.items()}
        heads = {name: next(queue) for name, queue in rest.items()}
        spent = {name: one.spent for name, one in self._waiting.items()}
        while heads:
            name = min(heads, key=lambda name: (name in self._barred, spent[name]))
            seq = heads.pop(name)
            yield seq
            spent[name] += self._advance(seq) / self._tenants[name].weight
            following = next(rest[name], None)
            if following is not None:
                heads[name] = following
            heads = {name: heads[name] for name in self._waiting if name in heads}

    def push(self, seq: Sequence) -> None:
        tenant = self._tenant_of(seq)
        tenant.weight = seq.request.terms.weight
        if not tenant.queue:
            self._lift(tenant)
        self._queue(seq, tenant).push(seq)

    def put_back(self, seq: Sequence) -> None:
        self._settle(seq)
        self._queue(seq, self._tenant_of(seq)).put_back(seq)

    def pop(self) -> Sequence:
        waiting = self._waiting
        if len(waiting) == 1:
            name = next(iter(waiting))
        else:
            name = min(waiting, key=lambda name: (name in self._barred, waiting[name].spent))
        tenant = waiting[name]
        self._level = tenant.spent
        seq = tenant.queue.pop()
        if not tenant.queue:
            del waiting[name]
        if len(self._tenants) > 1:
            tenant.spent += self._advance(seq) / tenant.weight
            bill = self._bills[seq] = self._bills.get(seq) or _Bill(seq.planned)
            bill.paid = max(bill.paid, self._price(seq))
        return seq

    def remove(self, seq: Sequence) -> None:
        name = seq.request.tenant
        self._waiting[name].queue.remove(seq)
        if not self._waiting[name].queue:
            del self._waiting[name]

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        """The one that the inner order would take from who holds most, but never the eldest.

        So there is always one that gets to its end: two could else take turns at beginning anew.
        """
        if len(self._tenants) < 2 or len(running) == 1:
            return self._chooses.victim(running)
        holds: dict[bytes, float] = {}
        for seq in running:
            blocks = sum(len(table) - table.count(NO_BLOCK) for table in seq.tables)
            name = seq.request.tenant
            holds[name] = holds.get(name, 0.0) + blocks / seq.request.terms.weight
        others = list(running)[1:]
        most = max({seq.request.tenant for seq in others}, key=lambda name: (holds[name], name))
        return self._chooses.victim({seq: None for seq in others if seq.request.tenant == most})

    def bar(self, tenants: Iterable[bytes]) -> None:
        """It cannot be the turn of these now: others go before them."""
        self._barred = frozenset(tenants)

    def first(self, tenant: bytes) -> Sequence | None:
        """Who of a tenant's goes next."""
        found = self._waiting.get(tenant)
        return None if found is None else next(iter(found.queue))

    # -- service --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Count what those who had their turn were given since. Called once a step."""
        if len(self._tenants) < 2:
            return
        for seq in list(self._bills):
            self._settle(seq)
            if seq.state is State.FINISHED:
                del self._bills[seq]
        if len(self._tenants) > MANY:
            self._forget_idle()

    @property
    def billed(self) -> int:
        """Sequences whose service is counted."""
        return len(self._bills)

    def spent(self, tenant: bytes) -> float:
        """The virtual counter of one."""
        return self._tenants[tenant].spent

    def _settle(self, seq: Sequence) -> None:
        """Have its tenant pay for what it had, no more and no less."""
        if len(self._tenants) < 2:
            return
        bill = self._bills.get(seq)
        if bill is None:
            if seq.planned:  # it shares what another computed, and waits for its first turn
                self._bills[seq] = _Bill(seq.planned)
            return
        bill.had = max(bill.had, self._given(seq, bill))
        if bill.had != bill.paid:
            tenant = self._tenant_of(seq)
            tenant.spent += (bill.had - bill.paid) / tenant.weight
            bill.paid = bill.had

    def _given(self, seq: Sequence, bill: _Bill) -> float:
        """What a sequence was given; less than before while it recomputes, which is not charged.

        Of one that has said something all of the prompt was computed, also if its blocks are gone.
        """
        said = max(len(seq.tokens) - seq.first, 0)
        computed = seq.prompt_len if said else min(seq.planned, seq.prompt_len)
        return max(computed - max(seq.cached, bill.base), 0) + OUTPUT_COST * said

    def _price(self, seq: Sequence) -> float:
        """What it has cost when its prompt is computed, if nothing of it is cached."""
        bill = self._bills.get(seq)
        base = seq.planned if bill is None else max(seq.cached, bill.base)
        said = OUTPUT_COST * max(len(seq.tokens) - seq.first, 0)
        return max(seq.prompt_len - base, 0) + said

    def _advance(self, seq: Sequence) -> float:
        """What a turn is to be paid for before it is had."""
        if len(self._tenants) < 2:
            return 0.0
        bill = self._bills.get(seq)
        return max(self._price(seq) - (0.0 if bill is None else bill.paid), 0.0)

    def _lift(self, tenant: _Tenant) -> None:
        level = min([one.spent for one in self._waiting.values()], default=self._level)
        tenant.spent = max(tenant.spent, level)

    # -- tenants --------------------------------------------------------------------------------

    def _tenant_of(self, seq: Sequence) -> _Tenant:
        name = seq.request.tenant
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = _Tenant(self._inner())
        return found

    def _queue(self, seq: Sequence, tenant: _Tenant) -> Order:
        self._waiting[seq.request.tenant] = tenant
        return tenant.queue

    def _forget_idle(self) -> None:
        here = {seq.request.tenant for seq in self._bills} | self._waiting.keys()
        level = min([one.spent for one in self._waiting.values()], default=self._level)
        self._tenants = {
            name: one
            for name, one in self._tenants.items()
            if name in here or one.spent > level  # else they would be lifted to it anyway
        }
