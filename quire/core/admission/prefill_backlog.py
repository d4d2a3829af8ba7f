"""Prefill backlog: counts the prompt tokens that are still to be computed, by size.

It counts active requests, and the prompt tokens that no step has computed yet. Recomputation after
preemption is not counted again. With size buckets the cost of a change or a query does not depend
on the number of requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.types import Request

NUM_BUCKETS = 33
OLDEST_PROMPT_SHARE = 1 / 4
"""Share of a step that a long prompt keeps beside shorter ones: see
quire.core.scheduling.limits.shortest_prompt_first.
"""


def _bucket(tokens: int) -> int:
    size = tokens.bit_length()
    return size if size < NUM_BUCKETS else NUM_BUCKETS - 1


class SizeBuckets:
    """Backlog of one tenant: requests, tokens left, and both by the bit length of tokens left.

    A request counts as its answers: n, or the beams of the search that it begins.
    """

    __slots__ = ("counts", "requests", "sums", "tokens", "weight")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.weight = 1.0
        self.counts = [0] * NUM_BUCKETS
        self.sums = [0] * NUM_BUCKETS

    def move(self, before: int, after: int) -> None:
        """Change the tokens left of one prompt from `before` to `after`; 0: not counted."""
        self.tokens += after - before
        if before:
            size = _bucket(before)
            self.counts[size] -= 1
            self.sums[size] -= before
        if after:
            size = _bucket(after)
            self.counts[size] += 1
            self.sums[size] += after

    def excess_tokens(self, tokens: int, most: int | None) -> int:
        """Tokens beyond `most` if a prompt of `tokens` is added; 0 without others."""
        return 0 if most is None or not self.tokens else max(self.tokens + tokens - most, 0)

    def tokens_before(self, tokens: int) -> float:
        """Return the tokens computed before the end of a prompt of this length.

        Shorter prompts go first; of the longer ones the oldest keeps its share.
        """
        size = _bucket(max(tokens, 1))
        longer = any(self.counts[size + 1 :])
        share = OLDEST_PROMPT_SHARE / (1 - OLDEST_PROMPT_SHARE)
        shorter = sum(self.sums[: size + 1])
        return shorter + (min((shorter + tokens) * share, self.tokens - shorter) if longer else 0)


class PrefillBacklog:
    """Backlog of all tenants. Written only by quire.core.admission.admission_control."""

    def __init__(self) -> None:
        self.total = SizeBuckets()
        self._tenants: dict[bytes, SizeBuckets] = {}
        self._remaining: dict[str, int] = {}  # request id -> tokens

    def add_request(self, request: Request) -> None:
        """Count an accepted request."""
        buckets = self._tenants.setdefault(request.tenant, SizeBuckets())
        buckets.weight = request.tenant_limits.weight
        self._remaining[request.id] = 0
        for one in (self.total, buckets):
            one.requests += request.num_answers
        self.set_remaining(request, len(request.prompt))

    def set_remaining(self, request: Request, tokens: int) -> None:
        """Set the prompt tokens that are left to compute. Unknown requests are ignored."""
        before = self._remaining.get(request.id)
        if before is None or before == tokens:
            return
        self._remaining[request.id] = tokens
        for one in (self.total, self._tenants[request.tenant]):
            one.move(before, tokens)

    def remove_request(self, request: Request) -> None:
        """Stop counting a request that has ended."""
        if request.id not in self._remaining:
            return
        self.set_remaining(request, 0)
        del self._remaining[request.id]
        buckets = self._tenants[request.tenant]
        for one in (self.total, buckets):
            one.requests -= request.num_answers
        if not buckets.requests:
            del self._tenants[request.tenant]

    def of_tenant(self, tenant: bytes) -> SizeBuckets:
        """Return the backlog of one tenant."""
        return self._tenants.get(tenant) or SizeBuckets()

    @property
    def by_tenant(self) -> Mapping[bytes, SizeBuckets]:
        """Return the backlogs of tenants that have active requests."""
        return self._tenants

    def tokens_ahead(self, tenant: bytes, weight: float, tokens: int) -> float:
        """Tokens computed before the end of a prompt that arrives now, of a tenant of this weight.

        Assumes that meanwhile each other tenant gets at most equal service, scaled by its weight.
        """
        own_before = self.of_tenant(tenant).tokens_before(tokens)
        own = own_before + tokens
        return own_before + sum(
            min(float(buckets.tokens), own * buckets.weight / weight)
            for name, buckets in self._tenants.items()
            if name != tenant
        )
