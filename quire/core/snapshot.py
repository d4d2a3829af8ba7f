"""What the engine looks like at one moment, for people and dashboards. Plain data.

Counters only grow, so a reader gets rates and percentiles of any window from two snapshots; the
engine keeps no windows. Made by quire.core.accounting.snapshot_builder, between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.scheduler_stats import SchedulerStats

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds, inclusive, of Counters.step_tokens; the last bucket is what is above."""

PER_DOUBLING = 8
SHORTEST_S = 2.0**-14
TIME_BUCKETS = 20 * PER_DOUBLING
"""Times are counted in buckets a tenth wide, from 61 us to 64 s."""


class RequestRow(NamedTuple):
    """One sequence that is alive."""

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    state: str  # "running" | "waiting" | "preempted" | "swapped"
    prompt: int
    cached: int
    """Tokens of the prompt that came out of the prefix cache."""
    computed: int
    generated: int
    blocks: int
    preemptions: int
    seconds: float
    """Since the request arrived."""


class EngineCounters(NamedTuple):
    """Since the engine's start."""

    steps: int
    step_seconds: float
    """Time in which a step was under way."""
    prompt_tokens: int
    """Computed; tokens computed once more after a preemption included."""
    answered_tokens: int
    """Of prompts whose first answer has begun; once a request, whatever n."""
    cached_tokens: int
    """Of those, found in the prefix cache."""
    generated_tokens: int
    finished: dict[str, int]
    """Sequences by how they ended; "stop_string" is an end that the text half decided on."""
    breakdown_seconds: list[float]
    """Of the ended ones, where their time went, in the order of timing.CUTS."""
    step_tokens: list[int]
    """Steps by their number of tokens (STEP_TOKENS)."""
    step_tokens_sum: int
    first_token_times: list[int]
    """Sequences by the time from arrival to first token (time_bucket)."""
    inter_token_times: list[int]
    """Tokens by the time since the one before (time_bucket)."""


class GrammarStats(NamedTuple):
    """Grammars of structured output: counters since the engine's start, and how it is now."""

    compiled: int = 0
    failed: int = 0
    hits: int = 0
    """Asked for when they were there already."""
    compile_seconds: float = 0.0
    waiting: int = 0
    cached: int = 0
    cached_bytes: int = 0


class TenantStats(NamedTuple):
    """Of one tenant: counters since the engine's start, and what it has here now."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    active_requests: int = 0
    """Requests, running and waiting."""
    queued_tokens: int = 0


class AdmissionStats(NamedTuple):
    """Who waits at the door of the engine, and who was sent away."""

    requests: int = 0
    """Here, running and waiting."""
    queued_tokens: int = 0
    """Of prompts, not computed yet."""
    max_requests: int = 0
    """0: no bound."""
    max_queued_tokens: int = 0
    predicted_ttft_s: float = 0.0
    """Of a prompt of the usual length that came now; 0: nothing is known."""
    refused: dict[str, int] = {}  # noqa: RUF012 - a NamedTuple's default, never written to
    """Requests by the bound that they met."""
    tenants: dict[str, TenantStats] = {}  # noqa: RUF012
    """By the digest of the name, in hexadecimal."""


class Snapshot(NamedTuple):
    """rows are cut off at as many as were asked for; stats has the true counts."""

    at: float
    """Monotonic clock, seconds."""
    stats: SchedulerStats
    preempted: int
    """Sequences that wait to run again, swapped ones included; stats.waiting has the others too."""
    max_seqs: int
    block_size: int
    counters: EngineCounters
    rows: list[RequestRow]
    block_states: bytes = b""
    """One BlockState per block; empty unless the map was asked for."""
    block_owners: bytes = b""
    """array('H'), one per block: 0 nobody shown, k + 1 = rows[k] (the first, if it is shared)."""
    grammars: GrammarStats = GrammarStats()
    admission: AdmissionStats = AdmissionStats()


def time_bucket(seconds: float) -> int:
    """In which bucket a time is counted."""
    if seconds <= SHORTEST_S:
        return 0
    return min(int(math.log2(seconds / SHORTEST_S) * PER_DOUBLING), TIME_BUCKETS - 1)


def percentiles(
    counts: Seq[int], before: Seq[int] | None, wanted: Seq[float]
) -> list[float] | None:
    """Times at these shares (0.5, 0.99) of what was counted since `before`. None: nothing was.

    before: the same counter in an earlier snapshot, or None for all since the start.
    """
    since = [n - m for n, m in zip(counts, before)] if before is not None else list(counts)
    total = sum(since)
    if not total:
        return None
    return [_quantile(since, share * total) for share in wanted]


def _quantile(counts: Seq[int], rank: float) -> float:
    """The time below which `rank` of the counted ones lie, even within a bucket."""
    seen = 0
    for i, n in enumerate(counts):
        if n and seen + n >= rank:
            within = (rank - seen) / n
            return SHORTEST_S * math.pow(2.0, (i + within) / PER_DOUBLING)
        seen += n
    raise AssertionError(f"rank {rank} of {seen}")
