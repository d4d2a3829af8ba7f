"""How much there is to compute before somebody's turn: prompts by what is left of them.

Counts requests that are here, and the tokens of their prompts that no step was given yet. What was
preempted is computed again and not counted again. Kept in classes of size, so that neither a look
nor a change depends on how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.types import Request

CLASSES = 33
SHARE_OF_ELDEST = 1 / 4
"""Of a step, what a long prompt keeps beside shorter ones: see quire.core.limits.short_first."""


class Pile:
    """Of one tenant: requests, tokens left, and the same by the number of bits of what is left."""

    __slots__ = ("counts", "requests", "sums", "tokens", "weight")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.weight = 1.0
        self.counts = [0] * CLASSES
        self.sums = [0] * CLASSES

    def change(self, before: int, after: int) -> None:
        """A prompt that had so much left has so much left now; 0: nothing, or it is not here."""
        self.tokens += after - before
        for left, sign in ((before, -1), (after, 1)):
            if left:
                size = min(left.bit_length(), CLASSES - 1)
                self.counts[size] += sign
                self.sums[size] += sign * left

    def over(self, tokens: int, most: int | None) -> int:
        """Tokens too many if a prompt of so many came, and `most` may wait. An only one may."""
        return 0 if most is None or not self.tokens else max(self.tokens + tokens - most, 0)

    def before(self, tokens: int) -> float:
        """Tokens that go before the end of a prompt of so many: shorter ones go first, and of the
        longer ones the eldest keeps its share."""
        size = min(max(tokens, 1).bit_length(), CLASSES - 1)
        longer = any(self.counts[size + 1 :])
        share = SHARE_OF_ELDEST / (1 - SHARE_OF_ELDEST)
        shorter = sum(self.sums[: size + 1])
        return shorter + (min((shorter + tokens) * share, self.tokens - shorter) if longer else 0)


class Backlog:
    """Written by quire.core.limits.door alone."""

    def __init__(self) -> None:
        self.all = Pile()
        self._piles: dict[bytes, Pile] = {}
        self._left: dict[str, int] = {}  # by request

    def enter(self, request: Request) -> None:
        """It is here now."""
        pile = self._piles.setdefault(request.tenant, Pile())
        pile.weight = request.terms.weight
        self._left[request.id] = 0
        for one in (self.all, pile):
            one.requests += 1
        self.now_left(request, len(request.prompt))

    def now_left(self, request: Request, tokens: int) -> None:
        """So many tokens of its prompt are left to compute. Unknown requests are ignored."""
        before = self._left.get(request.id)
        if before is None or before == tokens:
            return
        self._left[request.id] = tokens
        for one in (self.all, self._piles[request.tenant]):
            one.change(before, tokens)

    def leave(self, request: Request) -> None:
        """It has ended."""
        if request.id not in self._left:
            return
        self.now_left(request, 0)
        del self._left[request.id]
        pile = self._piles[request.tenant]
        for one in (self.all, pile):
            one.requests -= 1
        if not pile.requests:
            del self._piles[request.tenant]

    def of(self, tenant: bytes) -> Pile:
        """What one tenant has here."""
        return self._piles.get(tenant) or Pile()

    @property
    def piles(self) -> Mapping[bytes, Pile]:
        """Of those who have something here."""
        return self._piles

    def ahead(self, tenant: bytes, weight: float, tokens: int) -> float:
        """Tokens computed before the end of a prompt that came now, of a tenant of this weight.

        While it waits, every other tenant gets service as it does, by weight, and no more.
        """
        mine = self.of(tenant).before(tokens)
        own = mine + tokens
        return mine + sum(
            min(float(pile.tokens), own * pile.weight / weight)
            for name, pile in self._piles.items()
            if name != tenant
        )
