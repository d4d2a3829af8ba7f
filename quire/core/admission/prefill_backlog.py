"""Prefill backlog: counts the prompt tokens that are still to be computed, by size.

It counts requests that are here, and the tokens of their prompts that no step was given yet. What
was preempted is computed again and not counted again. Size buckets make the cost of a change or a
query independent of the number of requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.types import Request

NUM_BUCKETS = 33
OLDEST_PROMPT_SHARE = 1 / 4
"""Of a step, what a long prompt keeps beside shorter ones: see
quire.core.scheduling.limits.shortest_prompt_first.
"""


class SizeBuckets:
    """Of one tenant: requests, tokens left, and the same by the number of bits of what is left."""

    __slots__ = ("counts", "requests", "sums", "tokens", "weight")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.weight = 1.0
        self.counts = [0] * NUM_BUCKETS
        self.sums = [0] * NUM_BUCKETS

    def move(self, before: int, after: int) -> None:
        """A prompt that had so much left has so much left now; 0: nothing, or it is not here."""
        self.tokens += after - before
        for left, sign in ((before, -1), (after, 1)):
            if left:
                size = min(left.bit_length(), NUM_BUCKETS - 1)
                self.counts[size] += sign
                self.sums[size] += sign * left

    def excess_tokens(self, tokens: int, most: int | None) -> int:
        """Tokens too many if a prompt of so many came, and `most` may wait. An only one may."""
        return 0 if most is None or not self.tokens else max(self.tokens + tokens - most, 0)

    def tokens_before(self, tokens: int) -> float:
        """Tokens that go before the end of a prompt of so many: shorter ones go first, and of the
        longer ones the eldest keeps its share."""
        size = min(max(tokens, 1).bit_length(), NUM_BUCKETS - 1)
        longer = any(self.counts[size + 1 :])
        share = OLDEST_PROMPT_SHARE / (1 - OLDEST_PROMPT_SHARE)
        shorter = sum(self.sums[: size + 1])
        return shorter + (min((shorter + tokens) * share, self.tokens - shorter) if longer else 0)


class PrefillBacklog:
    """Written by quire.core.admission.admission_control alone."""

    def __init__(self) -> None:
        self.total = SizeBuckets()
        self._tenants: dict[bytes, SizeBuckets] = {}
        self._remaining: dict[str, int] = {}  # by request

    def add_request(self, request: Request) -> None:
        """It is here now."""
        pile = self._tenants.setdefault(request.tenant, SizeBuckets())
        pile.weight = request.tenant_limits.weight
        self._remaining[request.id] = 0
        for one in (self.total, pile):
            one.requests += 1
        self.set_remaining(request, len(request.prompt))

    def set_remaining(self, request: Request, tokens: int) -> None:
        """So many tokens of its prompt are left to compute. Unknown requests are ignored."""
        before = self._remaining.get(request.id)
        if before is None or before == tokens:
            return
        self._remaining[request.id] = tokens
        for one in (self.total, self._tenants[request.tenant]):
            one.move(before, tokens)

    def remove_request(self, request: Request) -> None:
        """It has ended."""
        if request.id not in self._remaining:
            return
        self.set_remaining(request, 0)
        del self._remaining[request.id]
        pile = self._tenants[request.tenant]
        for one in (self.total, pile):
            one.requests -= 1
        if not pile.requests:
            del self._tenants[request.tenant]

    def of_tenant(self, tenant: bytes) -> SizeBuckets:
        """What one tenant has here."""
        return self._tenants.get(tenant) or SizeBuckets()

    @property
    def by_tenant(self) -> Mapping[bytes, SizeBuckets]:
        """Of those who have something here."""
        return self._tenants

    def tokens_ahead(self, tenant: bytes, weight: float, tokens: int) -> float:
        """Tokens computed before the end of a prompt that came now, of a tenant of this weight.

        While it waits, every other tenant gets service as it does, by weight, and no more.
        """
        mine = self.of_tenant(tenant).tokens_before(tokens)
        own = mine + tokens
        return mine + sum(
            min(float(pile.tokens), own * pile.weight / weight)
            for name, pile in self._tenants.items()
            if name != tenant
        )
