"""What tenants have used, and who may have no more tokens this minute.

Tokens a minute are a bucket that fills at that rate and holds a minute's worth. A request is let in
if what is in it covers its prompt, or if it is full; answers are taken out as they are generated,
also beyond the bottom: that debt is waited for by the next.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.snapshot import TenantStats
from quire.core.tenant_limits import TenantLimits
from quire.core.types import Request, Sequence, SequenceState

MAX_TENANTS = 4096
"""Tenants beyond which those that ended longest ago are forgotten."""


class TenantUsage:
    """Of one tenant, since the engine's start. left, at: the bucket, and when it was looked at."""

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
        """With what it has here now."""
        return TenantStats(
            self.requests,
            self.refused,
            self.prompt_tokens,
            self.generated_tokens,
            requests,
            queued_tokens,
        )


class TenantUsageTable:
    """Told by quire.core.admission.admission_control, which has the clock."""

    def __init__(self) -> None:
        self._tenants: dict[bytes, TenantUsage] = {}
        self._counted_tokens: dict[Sequence, int] = {}  # tokens of answers that were counted

    def of_tenant(self, tenant: bytes, now: float) -> TenantUsage:
        """Its usage; made if it is new."""
        found = self._tenants.get(tenant)
        if found is None:
            if len(self._tenants) >= MAX_TENANTS:
                del self._tenants[next(iter(self._tenants))]
            found = self._tenants[tenant] = TenantUsage(now)
        return found

    def wait_s(self, tenant: bytes, terms: TenantLimits, tokens: int, now: float) -> float:
        """Seconds until a prompt of so many tokens may come in; 0: it may."""
        per_minute = terms.tokens_per_minute
        if per_minute is None:
            return 0.0
        tokens_left = self._refill(self.of_tenant(tenant, now), per_minute, now)
        missing = min(tokens, per_minute) - tokens_left
        return max(missing, 0.0) * 60.0 / per_minute

    def tokens_left(self, tenant: bytes) -> float:
        """What is in its bucket, as of the last look."""
        return self._tenants[tenant].bucket_tokens or 0.0

    def charge_prompt(self, request: Request, now: float) -> None:
        """It was let in: its prompt is taken out."""
        usage = self.of_tenant(request.tenant, now)
        usage.requests += 1
        usage.prompt_tokens += len(request.prompt)
        self._consume(usage, request.tenant_limits, len(request.prompt), now)

    def track_output(self, seq: Sequence) -> None:
        """Count from now on what it says."""
        self._counted_tokens.setdefault(seq, len(seq.tokens) - seq.prompt_len)

    def charge_outputs(self, now: float) -> None:
        """Count what was said since."""
        for seq, before in list(self._counted_tokens.items()):
            said = len(seq.tokens) - seq.prompt_len
            if said > before:
                usage = self.of_tenant(seq.request.tenant, now)
                usage.generated_tokens += said - before
                self._consume(usage, seq.request.tenant_limits, said - before, now)
                self._counted_tokens[seq] = said
            if seq.state is SequenceState.FINISHED:
                del self._counted_tokens[seq]

    @property
    def by_tenant(self) -> Mapping[bytes, TenantUsage]:
        """By tenant."""
        return self._tenants

    def _consume(self, usage: TenantUsage, terms: TenantLimits, tokens: int, now: float) -> None:
        if terms.tokens_per_minute is not None:
            usage.bucket_tokens = self._refill(usage, terms.tokens_per_minute, now) - tokens

    def _refill(self, usage: TenantUsage, per_minute: int, now: float) -> float:
        """What is in the bucket now."""
        if usage.bucket_tokens is None:
            usage.bucket_tokens = float(per_minute)
        usage.bucket_tokens = min(
            usage.bucket_tokens + (now - usage.refilled_at) * per_minute / 60.0, float(per_minute)
        )
        usage.refilled_at = now
        return usage.bucket_tokens
