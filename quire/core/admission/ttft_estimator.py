"""TTFT estimator: predicts the time to first token of a new prompt from past steps.

It learns two quantities, with exponential decay: the fixed cost of a step and its cost per prompt
token (a line fitted through the steps), and the rate at which a backlog decreases. The first
predicts a prompt of one or two steps; the second a long queue, whatever limits it: the device,
slots, blocks, or the inter-token target of decoding rows.
"""

from __future__ import annotations

DECAY = 0.95
"""Weight of a step relative to the next one: about twenty steps have an effect."""
OUTLIER_FACTOR = 8.0
"""A longer step counts as this many mean steps: a stall is an exception."""
MIN_WEIGHT = 3.0
"""Minimum weight of steps for an estimate of the backlog's rate."""


class TTFTEstimator:
    """most: maximum of prompt tokens in a step."""

    def __init__(self, most: int) -> None:
        self._max_step_tokens = most
        self._n = self._p = self._s = self._pp = self._ps = 0.0  # weighted sums over steps
        self._full_n = self._full_p = self._full_s = 0.0  # over steps that left a backlog

    def observe_step(self, prompt_tokens: int, estimate_seconds: float, *, backlog: bool) -> None:
        """Learn from a step. backlog: more prompts were waiting."""
        if estimate_seconds <= 0 or (not prompt_tokens and not backlog):
            return
        if self._n > MIN_WEIGHT:
            estimate_seconds = min(
                estimate_seconds,
                OUTLIER_FACTOR * max(self._s / self._n, self._step_seconds(prompt_tokens)),
            )
        p, s = float(prompt_tokens), estimate_seconds
        self._n = self._n * DECAY + 1
        self._p = self._p * DECAY + p
        self._s = self._s * DECAY + s
        self._pp = self._pp * DECAY + p * p
        self._ps = self._ps * DECAY + p * s
        if backlog:
            self._full_n = self._full_n * DECAY + 1
            self._full_p = self._full_p * DECAY + p
            self._full_s = self._full_s * DECAY + s

    def estimate_seconds(self, tokens: float) -> float | None:
        """Return the seconds until `tokens` prompt tokens are computed; None without data."""
        if not self._n:
            return None
        under_way = self._s / self._n / 2  # on average half of the running step is over
        each = (
            self._full_p / self._full_n
            if self._full_n >= MIN_WEIGHT
            else float(self._max_step_tokens)
        )
        if tokens <= each or not self._full_p:
            steps = max(-(-tokens // self._max_step_tokens), 1)
            return under_way + steps * self._step_seconds(tokens / steps)
        return under_way + tokens * self._full_s / self._full_p

    def _step_seconds(self, tokens: float) -> float:
        """Return the seconds of a step with this many prompt tokens, by the fitted line."""
        mean_p, mean_s = self._p / self._n, self._s / self._n
        spread = self._pp / self._n - mean_p * mean_p
        slope = 0.0
        if spread > 1.0:
            slope = (self._ps / self._n - mean_p * mean_s) / spread
        elif mean_p:
            slope = mean_s / mean_p  # all steps were alike: the fixed cost is unknown
        slope = min(max(slope, 0.0), mean_s / mean_p if mean_p else 0.0)
        return mean_s + slope * (tokens - mean_p)
