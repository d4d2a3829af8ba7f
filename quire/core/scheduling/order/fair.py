"""Fair queue: gives waiting tenants equal service, by their weights.

Service is counted in tokens: one for a computed prompt token (prefix cache hits are free) and for
a verified draft, OUTPUT_COST for a generated one that was no draft; divided by the tenant's weight.
The waiting tenant with the least service is next; within a tenant another order decides. A tenant
that returns from idleness starts level with those that wait: no credit for the past, and its excess
stays. When memory runs out, the largest holder is preempted. With one tenant this is the inner
order.

Source: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024 (virtual token counter);
the victim and the free cached tokens are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from quire.core.scheduling.order.base import WaitingQueue
from quire.core.types import NO_BLOCK, Sequence, SequenceState

OUTPUT_COST = 2.0
"""A generated token takes a row of a step for itself; prompt tokens share theirs."""
MAX_TENANTS = 4096
"""Above this number, tenants without sequences are dropped."""


class _TenantQueue:
    """queue: its waiting sequences. virtual_counter: its service so far."""

    __slots__ = ("queue", "virtual_counter", "weight")

    def __init__(self, queue: WaitingQueue) -> None:
        self.queue = queue
        self.virtual_counter = 0.0
        self.weight = 1.0


class _ServiceAccount:
    """Service of one sequence that ran. Its charge may exceed its service just after pop()."""

    __slots__ = ("charged", "precomputed", "received")

    def __init__(self, base: int) -> None:
        self.precomputed = base  # leading tokens that other sequences computed
        self.received = 0.0
        self.charged = 0.0


class FairQueue:
    """inner: makes the order within a tenant."""

    def __init__(self, inner: Callable[[], WaitingQueue]) -> None:
        self._make_queue = inner
        self._victim_chooser = inner()  # of victims; its queue stays empty
        self._deprioritized: frozenset[bytes] = frozenset()
        self._tenants: dict[bytes, _TenantQueue] = {}
        self._waiting: dict[bytes, _TenantQueue] = {}  # tenants with a queue that is not empty
        self._accounts: dict[Sequence, _ServiceAccount] = {}
        self._last_virtual_counter = 0.0  # counter of the tenant that ran last

    def __len__(self) -> int:
        return sum([len(one.queue) for one in self._waiting.values()])

    def __iter__(self) -> Iterator[Sequence]:
        if len(self._waiting) < 2:
            for one in self._waiting.values():
                yield from one.queue
            return
        rest = {name: iter(one.queue) for name, one in self._waiting.items()}
        heads = {name: next(queue) for name, queue in rest.items()}
        virtual_counter = {name: one.virtual_counter for name, one in self._waiting.items()}
        while heads:
            name = min(heads, key=lambda name: (name in self._deprioritized, virtual_counter[name]))
            seq = heads.pop(name)
            yield seq
            virtual_counter[name] += self._upfront_charge(seq) / self._tenants[name].weight
            next_seq = next(rest[name], None)
            if next_seq is not None:
                heads[name] = next_seq
            heads = {name: heads[name] for name in self._waiting if name in heads}

    def push(self, seq: Sequence) -> None:
        tenant = self._tenant_of(seq)
        tenant.weight = seq.request.tenant_limits.weight
        if not tenant.queue:
            self._catch_up(tenant)
        self._queue(seq, tenant).push(seq)

    def requeue(self, seq: Sequence) -> None:
        self._charge_service(seq)
        self._queue(seq, self._tenant_of(seq)).requeue(seq)

    def pop(self) -> Sequence:
        waiting = self._waiting
        if len(waiting) == 1:
            name = next(iter(waiting))
        else:
            name = min(
                waiting,
                key=lambda name: (name in self._deprioritized, waiting[name].virtual_counter),
            )
        tenant = waiting[name]
        self._last_virtual_counter = tenant.virtual_counter
        seq = tenant.queue.pop()
        if not tenant.queue:
            del waiting[name]
        if len(self._tenants) > 1:
            tenant.virtual_counter += self._upfront_charge(seq) / tenant.weight
            account = self._accounts[seq] = self._accounts.get(seq) or _ServiceAccount(seq.planned)
            account.charged = max(account.charged, self._expected_service(seq))
        return seq

    def remove(self, seq: Sequence) -> None:
        name = seq.request.tenant
        self._waiting[name].queue.remove(seq)
        if not self._waiting[name].queue:
            del self._waiting[name]

    def choose_victim(self, running: dict[Sequence, None]) -> Sequence:
        """Return the inner order's choice among the largest tenant's sequences, never the oldest.

        So one sequence always finishes: otherwise two sequences could preempt each other forever.
        """
        if len(self._tenants) < 2 or len(running) == 1:
            return self._victim_chooser.choose_victim(running)
        holds: dict[bytes, float] = {}
        for seq in running:
            blocks = sum(len(table) - table.count(NO_BLOCK) for table in seq.tables)
            name = seq.request.tenant
            holds[name] = holds.get(name, 0.0) + blocks / seq.request.tenant_limits.weight
        others = list(running)[1:]
        largest = max({seq.request.tenant for seq in others}, key=lambda name: (holds[name], name))
        return self._victim_chooser.choose_victim(
            {seq: None for seq in others if seq.request.tenant == largest}
        )

    def deprioritize(self, tenants: Iterable[bytes]) -> None:
        """Move these tenants behind the others, because they cannot run now."""
        self._deprioritized = frozenset(tenants)

    def next_of_tenant(self, tenant: bytes) -> Sequence | None:
        """Return the next waiting sequence of a tenant."""
        waiting = self._waiting.get(tenant)
        return None if waiting is None else next(iter(waiting.queue))

    # -- service --------------------------------------------------------------------------------

    def charge_service(self) -> None:
        """Charge the service that running sequences got since the last call. Called once a step."""
        if len(self._tenants) < 2:
            return
        for seq in list(self._accounts):
            self._charge_service(seq)
            if seq.state is SequenceState.FINISHED:
                del self._accounts[seq]
        if len(self._tenants) > MAX_TENANTS:
            self._drop_idle_tenants()

    @property
    def num_accounts(self) -> int:
        """Number of sequences whose service is counted."""
        return len(self._accounts)

    def virtual_counter(self, tenant: bytes) -> float:
        """Return the virtual counter of a tenant."""
        return self._tenants[tenant].virtual_counter

    def _charge_service(self, seq: Sequence) -> None:
        """Charge its tenant exactly for the service that it got."""
        if len(self._tenants) < 2:
            return
        account = self._accounts.get(seq)
        if account is None:
            if seq.planned:  # a fork, which has blocks before its first step
                self._accounts[seq] = _ServiceAccount(seq.planned)
            return
        account.received = max(account.received, self._service_received(seq, account))
        if account.received != account.charged:
            tenant = self._tenant_of(seq)
            tenant.virtual_counter += (account.received - account.charged) / tenant.weight
            account.charged = account.received

    def _service_received(self, seq: Sequence, account: _ServiceAccount) -> float:
        """Return the service of a sequence; recomputation lowers it, and is not charged.

        A sequence with output has computed all of its prompt, also if its blocks are gone.
        """
        generated = len(seq.tokens) > seq.generation_start
        computed = seq.prompt_len if generated else min(seq.planned, seq.prompt_len)
        return max(computed - max(seq.cached, account.precomputed), 0) + _output_service(seq)

    def _expected_service(self, seq: Sequence) -> float:
        """Return its service once its prompt is computed, if nothing of it is cached."""
        account = self._accounts.get(seq)
        base = seq.planned if account is None else max(seq.cached, account.precomputed)
        return max(seq.prompt_len - base, 0) + _output_service(seq)

    def _upfront_charge(self, seq: Sequence) -> float:
        """Return the charge made in advance, when it is taken from the queue."""
        if len(self._tenants) < 2:
            return 0.0
        account = self._accounts.get(seq)
        return max(self._expected_service(seq) - (0.0 if account is None else account.charged), 0.0)

    def _catch_up(self, tenant: _TenantQueue) -> None:
        level = min(
            [one.virtual_counter for one in self._waiting.values()],
            default=self._last_virtual_counter,
        )
        tenant.virtual_counter = max(tenant.virtual_counter, level)

    # -- tenants --------------------------------------------------------------------------------

    def _tenant_of(self, seq: Sequence) -> _TenantQueue:
        name = seq.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _TenantQueue(self._make_queue())
        return tenant

    def _queue(self, seq: Sequence, tenant: _TenantQueue) -> WaitingQueue:
        self._waiting[seq.request.tenant] = tenant
        return tenant.queue

    def _drop_idle_tenants(self) -> None:
        active = {seq.request.tenant for seq in self._accounts} | self._waiting.keys()
        level = min(
            [one.virtual_counter for one in self._waiting.values()],
            default=self._last_virtual_counter,
        )
        self._tenants = {
            name: one
            for name, one in self._tenants.items()
            if name in active
            or one.virtual_counter > level  # others start at this level when they return
        }


def _output_service(seq: Sequence) -> float:
    """Return the service of the output of a sequence. Drafts count as prompt tokens do, accepted or
    not: they share the row of the token before them."""
    generated = max(len(seq.tokens) - seq.generation_start, 0)
    return OUTPUT_COST * max(generated - seq.accepted_drafts, 0) + seq.verified_drafts
