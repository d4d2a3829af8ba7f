"""Adapter limit: bounds the distinct adapters of a step, and gives each a slot of the device.

A request waits until the host has its adapter's weights, and holds them to its end. A step that
uses an adapter without a slot brings its weights into a slot: of those of the tenant that has most,
the one used longest ago. A slot counts for the tenant that used it last. All rows of an adapter in
a step share its slot, and a slot that a step uses is not given away in that step. Steps run in
order, so steps in flight need no more slots than one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from quire.core.scheduling.limits.base import NO_BOUND, StepBudget, StepListener
from quire.core.scheduling.waiting import ResourceProvider, ResourceWaits
from quire.core.snapshot import AdapterStats
from quire.core.types import AdapterRef, Request, Row, Sequence
from quire.errors import EngineError, RequestError, Unsupported

PATIENT_STEPS = 64
"""Steps in which an adapter may find no slot before no further sequence of another one starts."""

LoadOutcome = RequestError | EngineError | None
"""Of reading an adapter; None: the host has its weights."""


class AdapterProvider(Protocol):
    """Holds weights of adapters in host memory. quire.engine.core.adapter_store implements it."""

    def acquire(self, adapter: AdapterRef, tenant: bytes) -> bool:
        """Hold its weights until release(): each acquire() needs one. Returns whether they are
        there; if not, they are read elsewhere, and outcomes() has the end of it.

        tenant: for which they count.
        """
        ...

    def release(self, adapter: AdapterRef) -> None: ...

    def weights(self, adapter: AdapterRef) -> object:
        """Return the weights of an adapter that is held and there."""
        ...

    def pinned_digests(self) -> Container[bytes]:
        """Return the adapters whose slots are given away last."""
        ...

    def stats(self) -> AdapterStats:
        """Return what concerns host memory."""
        ...

    def outcomes(self) -> Iterator[tuple[bytes, LoadOutcome]]:
        """Yield digest and outcome of each adapter that was read since the last call."""
        ...

    @property
    def has_outcomes(self) -> bool: ...

    def set_outcome_callback(self, callback: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """Of one step: which slot each of its adapters has, and slots that it fills before."""

    slots: dict[bytes, int]  # digest -> slot
    loads: tuple[tuple[int, object], ...]  # slot, weights


class AdapterLimit(StepBudget, ResourceProvider, StepListener):
    """max_adapters: slots of the device. provider: None refuses requests with an adapter."""

    allows_overtaking = True  # by sequences without an adapter, or with one of this step

    def __init__(self, max_adapters: int, provider: AdapterProvider | None) -> None:
        self._max = max_adapters
        self._provider = provider
        self._live: Counter[bytes] = Counter()  # requests by adapter
        self._in_step: dict[bytes, list[str]] = {}  # adapter -> request of each row of this step
        self._started: dict[bytes, set[str]] = {}  # adapter -> live requests that had a row
        self._refs: dict[bytes, AdapterRef] = {}  # of live requests
        self._tenants: dict[bytes, bytes] = {}  # of them, the last that wanted it
        self._users: dict[bytes, bytes] = {}  # of slots: the last tenant
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by last use, the oldest first
        self._free = list(range(max_adapters))[::-1]
        self._slot_loads = 0
        self._step = 0
        self._refused: dict[bytes, int] = {}  # adapter -> step that first had no slot for it
        self._starved: bytes | None = None

    # -- the wait for weights in host memory ----------------------------------------------------

    def check_request(self, request: Request) -> None:
        if request.adapter is not None and self._provider is None:
            message = "this engine serves no adapters: start it with --enable-lora"
            raise Unsupported(f"{message} (enable_lora=True)", param="lora_request")

    def request(self, request: Request) -> Iterable[Hashable]:
        adapter = request.adapter
        if adapter is None or self._provider is None:
            return ()
        present = self._provider.acquire(adapter, request.tenant)
        self._live[adapter.digest] += 1
        self._refs[adapter.digest] = adapter
        self._tenants[adapter.digest] = request.tenant
        return () if present else (("adapter", adapter.digest),)

    def release(self, request: Request) -> None:
        adapter = request.adapter
        if adapter is None or self._provider is None:
            return
        self._provider.release(adapter)
        digest = adapter.digest
        self._live[digest] -= 1
        if not self._live[digest]:
            del self._live[digest], self._refs[digest], self._tenants[digest]
            self._refused.pop(digest, None)
        started = self._started.get(digest, set())
        started.discard(request.id)
        if not started:
            self._started.pop(digest, None)

    @property
    def has_outcomes(self) -> bool:
        return self._provider is not None and self._provider.has_outcomes

    def report(self, waits: ResourceWaits) -> None:
        assert self._provider is not None
        for digest, error in self._provider.outcomes():
            if error is None:
                waits.ready(("adapter", digest))
            else:
                waits.failed(("adapter", digest), error)

    def set_outcome_callback(self, callback: Callable[[], None]) -> None:
        if self._provider is not None:
            self._provider.set_outcome_callback(callback)

    def stats(self) -> AdapterStats | None:
        if self._provider is None:
            return None
        names = {digest: ref.name for digest, ref in self._refs.items()}
        running = [name for digest, name in names.items() if digest in self._in_step]
        waiting = [name for digest, name in names.items() if digest not in self._in_step]
        return self._provider.stats()._replace(
            max_adapters=self._max,
            running=tuple(running),
            waiting=tuple(waiting),
            slot_loads=self._slot_loads,
        )

    # -- adapters of a step ---------------------------------------------------------------------

    def begin_step(self, sequences: int) -> None:
        self._in_step = {}
        self._step += 1
        oldest = min(self._refused, key=self._refused.__getitem__, default=None)
        waited = 0 if oldest is None else self._step - self._refused[oldest]
        self._starved = oldest if waited > PATIENT_STEPS else None

    def allow(self, seq: Sequence, want: int) -> int:
        adapter = seq.request.adapter
        if adapter is None:
            return want
        digest = adapter.digest
        if seq.slot < 0 and self._starved not in (None, digest):
            return 0
        if digest in self._in_step or len(self._in_step) < self._max:
            return want
        if want:
            self._refused.setdefault(digest, self._step)
        return 0

    def take(self, seq: Sequence, n: int) -> None:
        adapter = seq.request.adapter
        if adapter is not None:
            digest = adapter.digest
            self._in_step.setdefault(digest, []).append(seq.request.id)
            self._refused.pop(digest, None)

    def undo(self, seq: Sequence, n: int) -> None:
        adapter = seq.request.adapter
        if adapter is not None:
            rows = self._in_step[adapter.digest]
            rows.remove(seq.request.id)
            if not rows:
                del self._in_step[adapter.digest]

    def free_decode_rows(self) -> int:
        """All running sequences may have a row if all their adapters find slots in one step."""
        return NO_BOUND if len(self._started) <= self._max else 0

    def take_each_decode_row(self, rows: Iterable[Row]) -> None:
        if self._started:
            for row in rows:
                self.take(row.seq, 1)

    def plan_part(self) -> AdapterSlots | None:
        if not self._in_step:
            return None
        assert self._provider is not None
        for digest, requests in self._in_step.items():
            self._started.setdefault(digest, set()).update(requests)
            if digest in self._slots:
                self._slots.move_to_end(digest)
        loads = []
        for digest in self._in_step:
            if digest not in self._slots:
                slot = self._free.pop() if self._free else self._take_slot()
                self._slots[digest] = slot
                self._slot_loads += 1
                loads.append((slot, self._provider.weights(self._refs[digest])))
            self._users[digest] = self._tenants[digest]
        return AdapterSlots({one: self._slots[one] for one in self._in_step}, tuple(loads))

    def _take_slot(self) -> int:
        """Take a slot of which this step has no need."""
        assert self._provider is not None
        pinned = self._provider.pinned_digests()
        counts = Counter(self._users[one] for one in self._slots)
        others = [one for one in self._slots if one not in self._in_step]
        taken = max(others, key=lambda one: (one not in pinned, counts[self._users[one]]))
        del self._users[taken]
        return self._slots.pop(taken)

    def observe_device_doubt(self) -> None:
        """Take all slots back: what the failed step has written there is unknown."""
        self._slots.clear()
        self._users.clear()
        self._free = list(range(self._max))[::-1]
