"""Arrival times of requests: seconds after the beginning, one per request.

Gaps are gamma-distributed: burstiness 1 is a Poisson process, more is more even, less is burstier.
A ramp changes the rate over the requests. The total time is always the number of requests divided
by the rate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from quire.errors import ConfigError

INF = float("inf")


@dataclass(frozen=True, slots=True)
class RequestRate:
    """Requests a second: constant, or growing from `start` to `end`."""

    per_s: float = INF
    ramp: Literal["linear", "exponential"] | None = None
    start: float = 0.0
    end: float = 0.0

    def __post_init__(self) -> None:
        if self.ramp is None:
            if self.per_s <= 0:
                raise ConfigError(f"--request-rate must be > 0, got {self.per_s:g}")
        elif self.per_s != INF:
            raise ConfigError("--ramp-up-strategy sets the rates: leave out --request-rate")
        elif self.start < 0 or self.end <= 0 or (self.ramp == "exponential" and self.start <= 0):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps must be > 0")

    def rate_at(self, done: float) -> float:
        """Return the rate when this share of the requests has started."""
        if self.ramp is None:
            return self.per_s
        if self.ramp == "linear":
            return max(self.start + (self.end - self.start) * done, 1e-3)
        return float(self.start * (self.end / self.start) ** done)


def compute_start_times(
    count: int, rate: RequestRate, burstiness: float, rng: random.Random
) -> list[float]:
    """Return start times of `count` requests; the first is 0."""
    if burstiness <= 0:
        raise ConfigError(f"--burstiness must be > 0, got {burstiness:g}")
    if rate.ramp is None and rate.per_s == INF:
        return [0.0] * count
    wanted = [1 / rate.rate_at(n / max(count - 1, 1)) for n in range(count - 1)]
    gaps = [rng.gammavariate(burstiness, mean / burstiness) for mean in wanted]
    scale = sum(wanted) / sum(gaps) if sum(gaps) else 1.0
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap * scale)
    return times
