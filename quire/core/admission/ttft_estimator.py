"""When a prompt that came now would be answered: learnt from the steps that were made.

Two things are learnt, both forgetting: what a step costs by itself and by the prompt tokens in it
(a line through the steps), and how fast a backlog goes down while there is one. The first tells of
a prompt that a step or two will take; the second of a long queue, whatever holds it up: the device,
seats, blocks, or the pace that decoding rows ask for.
"""

from __future__ import annotations

DECAY = 0.95
"""What a step counts after the next: some twenty are remembered."""
OUTLIER_FACTOR = 8.0
"""A step that took longer than so many mean ones counts as that: a stall is not the rule."""
MIN_WEIGHT = 3.0
"""Weight of steps from which the speed of a backlog is taken."""


class TTFTEstimator:
    """most: prompt tokens of a step at most."""

    def __init__(self, most: int) -> None:
        self._max_step_tokens = most
        self._n = self._p = self._s = self._pp = self._ps = 0.0  # weighted sums over steps
        self._full_n = self._full_p = self._full_s = 0.0  # of those that left a backlog

    def observe_step(self, prompt_tokens: int, estimate_seconds: float, *, backlog: bool) -> None:
        """A step did so much of prompts and took so long. backlog: more prompts were waiting."""
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
        """Until so many prompt tokens are computed; None while nothing is known."""
        if not self._n:
            return None
        under_way = self._s / self._n / 2  # of the step that runs, half is over in the mean
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
        """A step of so many prompt tokens, by the line through those that were made."""
        mean_p, mean_s = self._p / self._n, self._s / self._n
        spread = self._pp / self._n - mean_p * mean_p
        slope = 0.0
        if spread > 1.0:
            slope = (self._ps / self._n - mean_p * mean_s) / spread
        elif mean_p:
            slope = mean_s / mean_p  # steps were alike: nothing says what a step costs by itself
        slope = min(max(slope, 0.0), mean_s / mean_p if mean_p else 0.0)
        return mean_s + slope * (tokens - mean_p)
