"""What tenants have used, and who may have no more tokens this minute.

Tokens a minute are a bucket that fills at that rate and holds a minute's worth. A request is let in
if what is in it covers its prompt, or if it is full; answers are taken out as they are generated,
also beyond the bottom: that debt is waited for by the next.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.snapshot import TenantFigures
from quire.core.terms import Terms
from quire.core.types import Request, Sequence, State

MANY = 4096
"""Tenants beyond which those that ended longest ago are forgotten."""


class Usage:
    """Of one tenant, since the engine's start. left, at: the bucket, and when it was looked at."""

    __slots__ = ("at", "generated", "left", "prompt", "refused", "requests")

    def __init__(self, now: float) -> None:
        self.requests = 0
        self.refused = 0
        self.prompt = 0
        self.generated = 0
        self.left: float | None = None
        self.at = now

    def figures(self, requests: int, queued_tokens: int) -> TenantFigures:
        """With what it has here now."""
        return TenantFigures(
            self.requests, self.refused, self.prompt, self.generated, requests, queued_tokens
        )


class Usages:
    """Told by quire.core.limits.door, which has the clock."""

    def __init__(self) -> None:
        self._usages: dict[bytes, Usage] = {}
        self._said: dict[Sequence, int] = {}  # tokens of answers that were counted

    def of(self, tenant: bytes, now: float) -> Usage:
        """Its usage; made if it is new."""
        found = self._usages.get(tenant)
        if found is None:
            if len(self._usages) >= MANY:
                del self._usages[next(iter(self._usages))]
            found = self._usages[tenant] = Usage(now)
        return found

    def wait_s(self, tenant: bytes, terms: Terms, tokens: int, now: float) -> float:
        """Seconds until a prompt of so many tokens may come in; 0: it may."""
        per_minute = terms.tokens_per_minute
        if per_minute is None:
            return 0.0
        left = self._fill(self.of(tenant, now), per_minute, now)
        missing = min(tokens, per_minute) - left
        return max(missing, 0.0) * 60.0 / per_minute

    def left(self, tenant: bytes) -> float:
        """What is in its bucket, as of the last look."""
        return self._usages[tenant].left or 0.0

    def enter(self, request: Request, now: float) -> None:
        """It was let in: its prompt is taken out."""
        usage = self.of(request.tenant, now)
        usage.requests += 1
        usage.prompt += len(request.prompt)
        self._take(usage, request.terms, len(request.prompt), now)

    def watch(self, seq: Sequence) -> None:
        """Count from now on what it says."""
        self._said.setdefault(seq, len(seq.tokens) - seq.prompt_len)

    def settle(self, now: float) -> None:
        """Count what was said since."""
        for seq, before in list(self._said.items()):
            said = len(seq.tokens) - seq.prompt_len
            if said > before:
                usage = self.of(seq.request.tenant, now)
                usage.generated += said - before
                self._take(usage, seq.request.terms, said - before, now)
                self._said[seq] = said
            if seq.state is State.FINISHED:
                del self._said[seq]

    @property
    def all(self) -> Mapping[bytes, Usage]:
        """By tenant."""
        return self._usages

    def _take(self, usage: Usage, terms: Terms, tokens: int, now: float) -> None:
        if terms.tokens_per_minute is not None:
            usage.left = self._fill(usage, terms.tokens_per_minute, now) - tokens

    def _fill(self, usage: Usage, per_minute: int, now: float) -> float:
        """What is in the bucket now."""
        if usage.left is None:
            usage.left = float(per_minute)
        usage.left = min(usage.left + (now - usage.at) * per_minute / 60.0, float(per_minute))
        usage.at = now
        return usage.left
