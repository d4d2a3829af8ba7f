"""Admission control: refuses requests by limits of the queue, of each tenant, and of deadlines.

It runs where the queue is, so that the limits are exact, and reports the numbers. An accepted
request is never refused later. Shares of steps and of the KV cache are handled by
quire.core.scheduling.order.fair and quire.core.scheduling.limits.tenant_kv_quota.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from quire.core.admission.prefill_backlog import PrefillBacklog
from quire.core.admission.tenant_usage import TenantUsageTable
from quire.core.admission.ttft_estimator import TTFTEstimator
from quire.core.scheduling.limits.base import NO_BOUND, Admission, StepBudget, StepListener
from quire.core.snapshot import AdmissionStats
from quire.core.types import Request, Sequence
from quire.errors import Overloaded

REJECT_REASONS = (
    *("max_num_queued_reqs", "max_num_queued_tokens", "deadline"),
    *("key_requests", "key_queued_tokens", "key_tokens_per_minute"),
)
RETRY_AFTER_RANGE_S = (1.0, 60.0)
"""An earlier retry is useless, and a later time cannot be predicted."""
DECAY = 0.9
CHARGE_EVERY = 16
"""Steps between two updates of the count of generated tokens."""


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

    def check_request(self, request: Request) -> None:
        """Raise Overloaded if a limit refuses the request now."""
        if request.parent is not None or request.resumed_tokens:
            return
        self._tenant_usage.charge_outputs(self._clock())
        self._check_tenant(request)
        self._check_queue(request)
        self._check_deadline(request)

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

    def predicted_ttft_s(self, request: Request) -> float | None:
        """Estimate the time to first token of a request that came now; None without data."""
        tokens = len(request.prompt)
        ahead = self.backlog.tokens_ahead(request.tenant, request.tenant_limits.weight, tokens)
        return self.ttft_estimator.estimate_seconds(ahead + tokens)

    def _check_tenant(self, request: Request) -> None:
        terms, pile = request.tenant_limits, self.backlog.of_tenant(request.tenant)
        tokens = len(request.prompt)
        if terms.max_requests is not None and pile.requests >= terms.max_requests:
            self._reject(
                request,
                "key_requests",
                f"this key has {pile.requests} requests here, and may have {terms.max_requests}",
                self._mean_finish_gap_s,
                key_requests=pile.requests,
                max_key_requests=terms.max_requests,
            )
        if over := pile.excess_tokens(tokens, terms.max_queued_tokens):
            self._reject(
                request,
                "key_queued_tokens",
                f"this key has prompts of {pile.tokens} tokens waiting and this one has {tokens}, "
                f"and {terms.max_queued_tokens} may wait",
                self.ttft_estimator.estimate_seconds(over),
                key_queued_tokens=pile.tokens,
                max_key_queued_tokens=terms.max_queued_tokens or 0,
            )
        wait_s = self._tenant_usage.wait_s(request.tenant, terms, tokens, self._clock())
        if wait_s > 0:
            self._reject(
                request,
                "key_tokens_per_minute",
                f"this key may use {terms.tokens_per_minute} tokens a minute, and this prompt of "
                f"{tokens} is too much for now",
                wait_s,
                key_tokens_left=max(self._tenant_usage.tokens_left(request.tenant), 0.0),
                max_key_tokens_per_minute=terms.tokens_per_minute or 0,
            )

    def _check_queue(self, request: Request) -> None:
        here, tokens = self.backlog.total, len(request.prompt)
        if self._max_requests is not None and here.requests >= self._max_requests:
            self._reject(
                request,
                "max_num_queued_reqs",
                f"{here.requests} requests are here, and at most {self._max_requests} may be",
                self._mean_finish_gap_s,
            )
        if over := here.excess_tokens(tokens, self._max_tokens):
            self._reject(
                request,
                "max_num_queued_tokens",
                f"prompts of {here.tokens} tokens wait and this one has {tokens}, and "
                f"{self._max_tokens} may wait",
                self.ttft_estimator.estimate_seconds(over),
            )

    def _check_deadline(self, request: Request) -> None:
        if request.deadline_at is None:
            return
        predicted = self.predicted_ttft_s(request)
        left = request.deadline_at - self._clock()
        if predicted is not None and predicted > left:
            self._reject(
                request,
                "deadline",
                f"the first token is predicted in {predicted:.2f} s, and the deadline is in "
                f"{max(left, 0.0):.2f} s",
                predicted - max(left, 0.0),
                deadline_s=round(max(left, 0.0), 3),
            )

    def _reject(
        self, request: Request, reason: str, why: str, retry_s: float | None, **more: float
    ) -> None:
        """Raise Overloaded, with the numbers."""
        self._rejections[reason] += 1
        self._tenant_usage.of_tenant(request.tenant, self._clock()).refused += 1
        here, predicted = self.backlog.total, self.predicted_ttft_s(request)
        numbers: dict[str, float] = {
            "queued_requests": here.requests,
            "queued_tokens": here.tokens,
            **({} if self._max_requests is None else {"max_queued_requests": self._max_requests}),
            **({} if self._max_tokens is None else {"max_queued_tokens": self._max_tokens}),
            **({} if predicted is None else {"predicted_ttft_s": round(predicted, 3)}),
            **more,
        }
        low, high = RETRY_AFTER_RANGE_S
        after = min(max(retry_s or low, low), high)
        message = f"{why}: try again in {after:.0f} s"
        raise Overloaded(message, retry_after_s=after, reason=reason, numbers=numbers)

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
        here, usual = self.backlog.total, self._mean_prompt_tokens
        ahead = self.backlog.tokens_ahead(b"", 1.0, round(usual)) if here.tokens else 0.0
        return AdmissionStats(
            requests=here.requests,
            queued_tokens=here.tokens,
            max_requests=self._max_requests or 0,
            max_queued_tokens=self._max_tokens or 0,
            predicted_ttft_s=self.ttft_estimator.estimate_seconds(ahead + usual) or 0.0,
            refused=dict(self._rejections),
            tenants={
                name.hex(): usage.to_stats(
                    self.backlog.of_tenant(name).requests, self.backlog.of_tenant(name).tokens
                )
                for name, usage in self._tenant_usage.by_tenant.items()
            },
        )
