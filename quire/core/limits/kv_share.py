"""What a tenant may hold of the KV cache: beyond its share none of its waiting sequences come in.

Those that run may grow beyond it: nobody is stopped in the middle of a sentence, and where memory
runs short the order takes from whoever holds most. A tenant that holds nothing may always run one.
It also tells the order when a step begins: books are settled then, and who is at the share is
passed over.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.limits.base import NO_BOUND, Limit
from quire.core.order.fair import Fair
from quire.core.types import NO_BLOCK, Sequence, State

MANY = 64
"""Of so many sequences books are settled each step while somebody waits, of more less often."""
SELDOM = 16
"""Steps between two settlings while nobody waits."""


class KvShare(Limit):
    """blocks: of the cache. most_blocks: that a sequence of so many tokens needs."""

    passing = True

    def __init__(self, order: Fair, blocks: int, most_blocks: Callable[[int], int]) -> None:
        self._order = order
        self._blocks = blocks
        self._most_blocks = most_blocks
        self._aboard: dict[Sequence, None] = {}  # of tenants with a share
        self._held: dict[bytes, int] = {}
        self._steps = 0
        self._new: dict[Sequence, int] = {}  # came in this step -> blocks counted for it

    def begin(self, sequences: int) -> None:
        self._steps += 1
        often = 1 + self._order.billed // MANY if len(self._order) else SELDOM
        if self._steps % often == 0:
            self._order.settle()
        self._new = {}
        if self._aboard:
            self._count()
            self._order.bar({name for name in self._held if self._is_full(name)})

    def allow(self, seq: Sequence, want: int) -> int:
        if seq.state is State.RUNNING or seq.request.terms.kv_share is None:
            return want
        return want if self._fits(seq) else 0

    def take(self, seq: Sequence, n: int) -> None:
        if seq.request.terms.kv_share is not None and seq not in self._aboard:
            self._aboard[seq] = None
            self._new[seq] = self._most_blocks(len(seq.tokens))
            self._add(seq, self._new[seq])

    def undo(self, seq: Sequence, n: int) -> None:
        if seq in self._new:
            del self._aboard[seq]
            self._add(seq, -self._new.pop(seq))

    def slack(self) -> int:
        return NO_BOUND

    def _count(self) -> None:
        self._aboard = {seq: None for seq in self._aboard if seq.state is State.RUNNING}
        self._held = {}
        for seq in self._aboard:
            self._add(seq, sum(len(table) - table.count(NO_BLOCK) for table in seq.tables))

    def _add(self, seq: Sequence, blocks: int) -> None:
        name = seq.request.tenant
        self._held[name] = self._held.get(name, 0) + blocks

    def _is_full(self, tenant: bytes) -> bool:
        first = self._order.first(tenant)
        return first is not None and not self._fits(first)

    def _fits(self, seq: Sequence) -> bool:
        held = self._held.get(seq.request.tenant, 0)
        share = seq.request.terms.kv_share
        if not held or share is None:
            return True
        return held + self._most_blocks(len(seq.tokens)) <= share * self._blocks
