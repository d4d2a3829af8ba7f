"""Admission control: refuses requests by limits of the queue, of each tenant, and of deadlines.

It runs where the queue is, so that the limits are exact, and reports the numbers. An accepted
request is never refused later. Shares of steps and of the KV cache are handled by
quire.core.scheduling.order.fair and quire.core.scheduling.limits.tenant_kv_quota.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.admission.prefill_backlog import PrefillBacklog
from quire.core.admission.tenant_usage import TenantUsageTable
from quire.core.admission.ttft_estimator import TTFTEstimator
from quire.core.scheduler_stats import EngineLoad
from quire.core.scheduling.limits.base import NO_BOUND, Admission, StepBudget, StepListener
from quire.core.snapshot import AdmissionStats
from quire.core.tenant_limits import TenantLimits
from quire.core.types import Request, Sequence
from quire.errors import Overloaded, RequestError

REJECT_REASONS = (
    *("max_num_queued_reqs", "max_num_queued_tokens", "deadline"),
    *("key_requests", "key_queued_tokens", "key_tokens_per_minute"),
)
RETRY_AFTER_RANGE_S = (1.0, 60.0)
"""Bounds of Retry-After in seconds: an earlier retry fails again, a later one is a guess."""
DECAY = 0.9
CHARGE_EVERY = 16
"""Steps between two updates of the count of generated tokens."""


class _Batch(NamedTuple):
    """Requests of one body, which are admitted together. A request counts as its answers."""

    tenant: bytes
    limits: TenantLimits
    answers: int
    tokens: int  # of all prompts
    param: str  # the field that makes them many
    deadline_at: float | None


def _check_ever(batch: _Batch, most: int, limit: str) -> None:
    """Raise RequestError if the batch alone is over a limit: it would always be refused."""
    if batch.answers > most:
        message = f"the body has {batch.answers} requests (prompts times n or best_of), and "
        raise RequestError(f"{message}{limit.format(most)}: send fewer", param=batch.param)


class AdmissionControl(StepBudget, Admission, StepListener):
    """max_requests, max_tokens: None is unlimited. most: maximum of prompt tokens in a step.

    Always admitted: forks of a held request, and requests that a failed engine had accepted.
    """

    def __init__(
        self,
        *,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        most: int = 2048,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self.backlog = PrefillBacklog()
        self.ttft_estimator = TTFTEstimator(most)
        self._tenant_usage = TenantUsageTable()
        self._rejections: Counter[str] = Counter()
        self._steps = 0
        self._mean_prompt_tokens = 0.0  # tokens of a prompt, moving average
        self._last_finish_at = clock()
        self._mean_finish_gap_s = RETRY_AFTER_RANGE_S[
            0
        ]  # from the end of a request to the next, moving average

    # -- requests -----------------------------------------------------------------------------

    def check_batch(self, requests: Seq[Request]) -> None:
        """Check the requests of one body against all limits.

        Raises Overloaded if a limit refuses them now, and RequestError if it always would.
        """
        new = [one for one in requests if one.parent is None and not one.resumed_tokens]
        if not new:
            return
        self._tenant_usage.charge_outputs(self._clock())
        batch = _Batch(
            new[0].tenant,
            new[0].tenant_limits,
            sum(one.num_answers for one in new),
            sum(len(one.prompt) for one in new),
            "n" if any(one.num_answers > 1 for one in new) else "prompt",
            new[0].deadline_at,
        )
        self._check_tenant(batch)
        self._check_queue(batch)
        self._check_deadline(batch)

    def add_request(self, request: Request) -> None:
        self.backlog.add_request(request)
        self._tenant_usage.charge_prompt(request, self._clock())
        tokens = len(request.prompt)
        self._mean_prompt_tokens = (
            self._mean_prompt_tokens * DECAY + tokens * (1 - DECAY)
            if self._mean_prompt_tokens
            else tokens
        )

    def remove_request(self, request: Request) -> None:
        self.backlog.remove_request(request)
        now = self._clock()
        gap, self._last_finish_at = now - self._last_finish_at, now
        self._mean_finish_gap_s = self._mean_finish_gap_s * DECAY + gap * (1 - DECAY)

    def predicted_ttft_s(self, tenant: bytes, weight: float, tokens: int) -> float | None:
        """Estimate the time to first token of a prompt that arrives now; None without data."""
        ahead = self.backlog.tokens_ahead(tenant, weight, tokens)
        return self.ttft_estimator.estimate_seconds(ahead + tokens)

    def _check_tenant(self, batch: _Batch) -> None:
        limits, queued = batch.limits, self.backlog.of_tenant(batch.tenant)
        most = limits.max_requests
        if most is not None and queued.requests + batch.answers > most:
            _check_ever(batch, most, "this key may have {} requests at a time")
            self._reject(
                batch,
                "key_requests",
                f"this key has {queued.requests} active requests and sends {batch.answers} more, "
                f"and at most {most} may be active",
                self._mean_finish_gap_s,
                key_requests=queued.requests,
                max_key_requests=most,
            )
        if over := queued.excess_tokens(batch.tokens, limits.max_queued_tokens):
            self._reject(
                batch,
                "key_queued_tokens",
                f"this key has {queued.tokens} prompt tokens queued and sends {batch.tokens} more, "
                f"and at most {limits.max_queued_tokens} may be queued",
                self.ttft_estimator.estimate_seconds(over),
                key_queued_tokens=queued.tokens,
                max_key_queued_tokens=limits.max_queued_tokens or 0,
            )
        wait_s = self._tenant_usage.wait_s(batch.tenant, limits, batch.tokens, self._clock())
        if wait_s > 0:
            self._reject(
                batch,
                "key_tokens_per_minute",
                f"this key may use {limits.tokens_per_minute} tokens a minute, and a prompt of "
                f"{batch.tokens} tokens exceeds what is left now",
                wait_s,
                key_tokens_left=max(self._tenant_usage.tokens_left(batch.tenant), 0.0),
                max_key_tokens_per_minute=limits.tokens_per_minute or 0,
            )

    def _check_queue(self, batch: _Batch) -> None:
        queued, most = self.backlog.total, self._max_requests
        if most is not None and queued.requests + batch.answers > most:
            _check_ever(batch, most, "this server holds at most {} requests (max_num_queued_reqs)")
            self._reject(
                batch,
                "max_num_queued_reqs",
                f"{queued.requests} requests are active and {batch.answers} more were sent, and "
                f"at most {most} may be active",
                self._mean_finish_gap_s,
            )
        if over := queued.excess_tokens(batch.tokens, self._max_tokens):
            self._reject(
                batch,
                "max_num_queued_tokens",
                f"{queued.tokens} prompt tokens are queued and {batch.tokens} more were sent, and "
                f"at most {self._max_tokens} may be queued",
                self.ttft_estimator.estimate_seconds(over),
            )

    def _predict(self, batch: _Batch) -> float | None:
        return self.predicted_ttft_s(batch.tenant, batch.limits.weight, batch.tokens)

    def _check_deadline(self, batch: _Batch) -> None:
        if batch.deadline_at is None:
            return
        predicted = self._predict(batch)
        left = batch.deadline_at - self._clock()
        if predicted is not None and predicted > left:
            self._reject(
                batch,
                "deadline",
                f"the first token is predicted in {predicted:.2f} s, and the deadline is in "
                f"{max(left, 0.0):.2f} s",
                predicted - max(left, 0.0),
                deadline_s=round(max(left, 0.0), 3),
            )

    def _reject(
        self, batch: _Batch, reason: str, message: str, retry_s: float | None, **more: float
    ) -> None:
        """Raise Overloaded, with the numbers."""
        self._rejections[reason] += 1
        self._tenant_usage.of_tenant(batch.tenant, self._clock()).refused += 1
        queued, predicted = self.backlog.total, self._predict(batch)
        numbers: dict[str, float] = {
            "queued_requests": queued.requests,
            "queued_tokens": queued.tokens,
            **({} if self._max_requests is None else {"max_queued_requests": self._max_requests}),
            **({} if self._max_tokens is None else {"max_queued_tokens": self._max_tokens}),
            **({} if predicted is None else {"predicted_ttft_s": round(predicted, 3)}),
            **more,
        }
        low, high = RETRY_AFTER_RANGE_S
        after = min(max(retry_s or low, low), high)
        message = f"{message}: try again in {after:.0f} s"
        raise Overloaded(message, retry_after_s=after, reason=reason, numbers=numbers)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self.backlog.total.tokens, self.backlog.total.requests)

    # -- steps --------------------------------------------------------------------------------

    def begin_step(self, sequences: int) -> None:
        self._steps += 1
        if self._steps % CHARGE_EVERY == 0:  # also updated on every query
            self._tenant_usage.charge_outputs(self._clock())

    def take(self, seq: Sequence, n: int) -> None:
        self.backlog.set_remaining(seq.request, max(seq.prompt_len - seq.planned - n, 0))
        if seq.request.tenant and seq.planned + n >= seq.prompt_len:
            self._tenant_usage.track_output(seq)

    def undo(self, seq: Sequence, n: int) -> None:
        self.backlog.set_remaining(seq.request, max(seq.prompt_len - seq.planned, 0))

    def free_decode_rows(self) -> int:
        return NO_BOUND

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        self.ttft_estimator.observe_step(
            prompt_tokens, seconds, backlog=self.backlog.total.tokens > 0
        )

    # -- stats --------------------------------------------------------------------------------

    def stats(self) -> AdmissionStats:
        """Return counts of active requests and of refused ones."""
        self._tenant_usage.charge_outputs(self._clock())
        queued, typical = self.backlog.total, self._mean_prompt_tokens
        ahead = self.backlog.tokens_ahead(b"", 1.0, round(typical)) if queued.tokens else 0.0
        return AdmissionStats(
            requests=queued.requests,
            queued_tokens=queued.tokens,
            max_requests=self._max_requests or 0,
            max_queued_tokens=self._max_tokens or 0,
            predicted_ttft_s=self.ttft_estimator.estimate_seconds(ahead + typical) or 0.0,
            refused=dict(self._rejections),
            tenants={
                name.hex(): usage.to_stats(
                    self.backlog.of_tenant(name).requests, self.backlog.of_tenant(name).tokens
                )
                for name, usage in self._tenant_usage.by_tenant.items()
            },
        )
