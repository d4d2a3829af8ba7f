"""Step counters: totals about steps since the start. Written only by TimeAccounting."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from operator import add

from quire.core.sequence_timing import BREAKDOWN_FIELDS
from quire.core.snapshot import STEP_TOKENS, TIME_BUCKETS, EngineCounters, time_bucket


class StepCounters:
    """Counters that only increase."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self._answered = self._cached = self._loaded = 0
        self._finished: Counter[str] = Counter()
        self._breakdown_seconds = [0.0] * len(BREAKDOWN_FIELDS)
        self._steps = self._generated = self._step_tokens_sum = 0
        self._step_seconds = 0.0
        self._step_tokens = [0] * (len(STEP_TOKENS) + 1)
        self._first_token_times = [0] * TIME_BUCKETS
        self._inter_token_times = [0] * TIME_BUCKETS

    def count_step(self, tokens: int, seconds: float, generated: int) -> None:
        self._steps += 1
        self._step_seconds += seconds
        self._generated += generated
        self._step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        self._step_tokens_sum += tokens

    def count_accepted(self, drafts: int) -> None:
        """Count tokens that a step generated beyond one for each row."""
        self._generated += drafts

    def count_prompt(self, tokens: int, cached: int, loaded: int) -> None:
        self._answered += tokens
        self._cached += cached
        self._loaded += loaded

    def count_finished(self, reason: str, cuts: Iterable[float]) -> None:
        self._finished[reason] += 1
        self._breakdown_seconds = [*map(add, self._breakdown_seconds, cuts)]

    def count_first_token(self, seconds: float) -> None:
        self._first_token_times[time_bucket(seconds)] += 1

    def count_inter_token(self, seconds: float, tokens: int) -> None:
        self._inter_token_times[time_bucket(seconds)] += tokens

    def to_counters(self) -> EngineCounters:
        return EngineCounters(
            steps=self._steps,
            step_seconds=self._step_seconds,
            prompt_tokens=self.prompt_tokens,
            answered_tokens=self._answered,
            cached_tokens=self._cached,
            loaded_tokens=self._loaded,
            generated_tokens=self._generated,
            finished=dict(self._finished),
            breakdown_seconds=list(self._breakdown_seconds),
            step_tokens=list(self._step_tokens),
            step_tokens_sum=self._step_tokens_sum,
            first_token_times=list(self._first_token_times),
            inter_token_times=list(self._inter_token_times),
        )
