"""Tenant usage: counts tokens per tenant, and enforces tokens-per-minute limits.

The limit is a token bucket that refills at that rate and holds one minute's worth. A request is
admitted if the bucket covers its prompt, or is full. Answers are charged as they are generated and
may make the bucket negative: the next request waits until that debt is paid.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.snapshot import TenantStats
from quire.core.tenant_limits import TenantLimits
from quire.core.types import Request, Sequence, SequenceState

MAX_TENANTS = 4096
"""Above this number the tenants that ended longest ago are dropped."""


class TenantUsage:
    """Usage of one tenant since the start. bucket_tokens, refilled_at: the token bucket and
    the time of its last update."""

    __slots__ = (
        "bucket_tokens",
        "generated_tokens",
        "prompt_tokens",
        "refilled_at",
        "refused",
        "requests",
    )

    def __init__(self, now: float) -> None:
        self.requests = 0
        self.refused = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.bucket_tokens: float | None = None
        self.refilled_at = now

    def to_stats(self, requests: int, queued_tokens: int) -> TenantStats:
        """Return the stats, given the current requests and queued prompt tokens."""
        return TenantStats(
            self.requests,
            self.refused,
            self.prompt_tokens,
            self.generated_tokens,
            requests,
            queued_tokens,
        )


class TenantUsageTable:
    """Usage of all tenants. Updated by admission_control, which has the clock."""

    def __init__(self) -> None:
        self._tenants: dict[bytes, TenantUsage] = {}
        self._counted_tokens: dict[Sequence, int] = {}  # output tokens counted so far

    def of_tenant(self, tenant: bytes, now: float) -> TenantUsage:
        """Return the usage of a tenant, creating it if it is new."""
        usage = self._tenants.get(tenant)
        if usage is None:
            if len(self._tenants) >= MAX_TENANTS:
                del self._tenants[next(iter(self._tenants))]
            usage = self._tenants[tenant] = TenantUsage(now)
        return usage

    def wait_s(self, tenant: bytes, limits: TenantLimits, tokens: int, now: float) -> float:
        """Return the seconds until a prompt of this length is admitted; 0: now."""
        per_minute = limits.tokens_per_minute
        if per_minute is None:
            return 0.0
        tokens_left = self._refill(self.of_tenant(tenant, now), per_minute, now)
        missing = min(tokens, per_minute) - tokens_left
        return max(missing, 0.0) * 60.0 / per_minute

    def tokens_left(self, tenant: bytes) -> float:
        """Return the tokens in its bucket at the last update."""
        return self._tenants[tenant].bucket_tokens or 0.0

    def charge_prompt(self, request: Request, now: float) -> None:
        """Charge the prompt of an admitted request."""
        usage = self.of_tenant(request.tenant, now)
        usage.requests += 1
        usage.prompt_tokens += len(request.prompt)
        self._consume(usage, request.tenant_limits, len(request.prompt), now)

    def track_output(self, seq: Sequence) -> None:
        """Charge from now on the tokens that the sequence generates."""
        self._counted_tokens.setdefault(seq, len(seq.tokens) - seq.prompt_len)

    def charge_outputs(self, now: float) -> None:
        """Charge the tokens generated since the last call."""
        for seq, before in list(self._counted_tokens.items()):
            generated = len(seq.tokens) - seq.prompt_len
            if generated > before:
                usage = self.of_tenant(seq.request.tenant, now)
                usage.generated_tokens += generated - before
                self._consume(usage, seq.request.tenant_limits, generated - before, now)
                self._counted_tokens[seq] = generated
            if seq.state is SequenceState.FINISHED:
                del self._counted_tokens[seq]

    @property
    def by_tenant(self) -> Mapping[bytes, TenantUsage]:
        """Return all usage by tenant."""
        return self._tenants

    def _consume(self, usage: TenantUsage, limits: TenantLimits, tokens: int, now: float) -> None:
        if limits.tokens_per_minute is not None:
            usage.bucket_tokens = self._refill(usage, limits.tokens_per_minute, now) - tokens

    def _refill(self, usage: TenantUsage, per_minute: int, now: float) -> float:
        """Refill the bucket, and return its tokens."""
        if usage.bucket_tokens is None:
            usage.bucket_tokens = float(per_minute)
        usage.bucket_tokens = min(
            usage.bucket_tokens + (now - usage.refilled_at) * per_minute / 60.0, float(per_minute)
        )
        usage.refilled_at = now
        return usage.bucket_tokens
