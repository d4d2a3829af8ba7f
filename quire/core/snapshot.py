"""Snapshot: the state of the engine at one moment, for dashboards. Plain data.

Counters only grow, so a client computes rates and percentiles of any window from two snapshots; the
engine keeps no windows. Made by quire.core.accounting.snapshot_builder, between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.scheduler_stats import SchedulerStats
from quire.core.types import DraftCounts

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds, inclusive, of Counters.step_tokens; the last bucket counts larger steps."""

PER_DOUBLING = 8
SHORTEST_S = 2.0**-14
TIME_BUCKETS = 20 * PER_DOUBLING
"""Times are counted in buckets a tenth wide, from 61 us to 64 s."""


class RequestRow(NamedTuple):
    """One live sequence."""

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    state: str  # "running" | "waiting" | "preempted"
    prompt: int
    cached: int
    """Prompt tokens found in the prefix cache."""
    computed: int
    generated: int
    blocks: int
    preemptions: int
    seconds: float
    """Since the request arrived."""


class EngineCounters(NamedTuple):
    """Totals since the engine's start."""

    steps: int
    step_seconds: float
    """Time in which a step was in progress."""
    prompt_tokens: int
    """Computed tokens, recomputed ones after a preemption included."""
    answered_tokens: int
    """Tokens of prompts that have a first output token; once per request, for any n."""
    cached_tokens: int
    """Those of them that were found in the prefix cache, in tiers too."""
    loaded_tokens: int
    """Those of them that a tier had."""
    generated_tokens: int
    finished: dict[str, int]
    """Sequences by finish reason; "stop_string" is an end that quire.text found."""
    breakdown_seconds: list[float]
    """Time breakdown of ended sequences, in the order of BREAKDOWN_FIELDS."""
    step_tokens: list[int]
    """Steps by their number of tokens (STEP_TOKENS)."""
    step_tokens_sum: int
    first_token_times: list[int]
    """Sequences by the time from arrival to first token (time_bucket)."""
    inter_token_times: list[int]
    """Tokens by the time since the one before (time_bucket)."""
    draft_counts: DraftCounts = DraftCounts()


class GrammarStats(NamedTuple):
    """Grammars of structured output: totals since the engine's start, and the current state."""

    compiled: int = 0
    failed: int = 0
    hits: int = 0
    """Requested grammars that were compiled already."""
    compile_seconds: float = 0.0
    waiting: int = 0
    cached: int = 0
    cached_bytes: int = 0


class AdapterStats(NamedTuple):
    """LoRA adapters that requests use now, and loads of slots since the engine's start."""

    max_adapters: int = 0
    """Distinct ones in a step; 0: the engine serves none."""
    running: tuple[str, ...] = ()
    """Names of those of the last step."""
    waiting: tuple[str, ...] = ()
    """Names of the others that requests wait for."""
    slot_loads: int = 0
    """Adapters whose weights were sent to the device."""
    names: int = 0
    """Names that mean an adapter."""
    host_copies: int = 0
    """Adapters whose weights are in host memory."""
    loads: int = 0
    """Reads of adapters' files, also again."""
    load_seconds: float = 0.0
    load_failures: int = 0
    """Reads that found files missing or wrong."""
    evictions: int = 0
    """Copies that were dropped from host memory for others."""


class MediaStats(NamedTuple):
    """Encoder outputs of images, video and audio: totals since the engine's start, and the current
    state of the encoder cache."""

    hits: int = 0
    """Items of prompts whose rows were cached, or encoded for another prompt in the same step."""
    misses: int = 0
    """Items that were encoded."""
    evictions: int = 0
    encoded_rows: int = 0
    cached: int = 0
    """Items."""
    cached_bytes: int = 0
    capacity_bytes: int = 0


class LateWorkCounts(NamedTuple):
    """Kernels and CUDA graphs that were prepared after the engine was ready: totals since then."""

    kernel_compilations: int = 0
    """Kernels compiled, read from disk, or first loaded to the device."""
    graph_captures: int = 0
    seconds: float = 0.0
    """Time that steps waited for both."""


class ExpertBalanceStats(NamedTuple):
    """Experts that moved between ranks: totals since the engine's start, and the last balancing."""

    rebalances: int = 0
    moved_experts: int = 0
    balancedness: float = 0.0
    """Tokens of a rank: the mean over the greatest, in the last window; 0: it was not measured."""
    balancedness_after: float = 0.0
    """The same tokens, in the placement that was chosen."""


class TenantStats(NamedTuple):
    """Stats of one tenant: totals since the engine's start, and its current requests."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    active_requests: int = 0
    """Running and waiting requests."""
    queued_tokens: int = 0


class AdmissionStats(NamedTuple):
    """Stats of admission control: active requests, limits, and refused requests."""

    requests: int = 0
    """Running and waiting requests."""
    queued_tokens: int = 0
    """Prompt tokens that are not computed yet."""
    max_requests: int = 0
    """0: unlimited."""
    max_queued_tokens: int = 0
    predicted_ttft_s: float = 0.0
    """Predicted time to first token of a prompt of mean length that arrives now; 0: unknown."""
    refused: dict[str, int] = {}  # noqa: RUF012 - a NamedTuple's default, never written to
    """Refused requests by the limit that they exceeded."""
    tenants: dict[str, TenantStats] = {}  # noqa: RUF012
    """Stats by the digest of the tenant's name, in hexadecimal."""


class Snapshot(NamedTuple):
    """rows is limited to the requested number; stats has the true counts."""

    at: float
    """Monotonic clock, seconds."""
    stats: SchedulerStats
    preempted: int
    """Sequences that wait to run again; stats.waiting has the others too."""
    max_seqs: int
    block_size: int
    counters: EngineCounters
    rows: list[RequestRow]
    block_states: bytes = b""
    """One BlockState per block; empty if the map was not requested."""
    block_owners: bytes = b""
    """array('H'), one per block: 0 none of rows, k + 1 = rows[k] (the first, if it is shared)."""
    grammars: GrammarStats = GrammarStats()
    admission: AdmissionStats = AdmissionStats()
    late_work: LateWorkCounts = LateWorkCounts()
    adapters: AdapterStats = AdapterStats()
    experts: ExpertBalanceStats = ExpertBalanceStats()
    media: MediaStats = MediaStats()


def time_bucket(seconds: float) -> int:
    """Return the index of the bucket of a time."""
    if seconds <= SHORTEST_S:
        return 0
    return min(int(math.log2(seconds / SHORTEST_S) * PER_DOUBLING), TIME_BUCKETS - 1)


def percentiles(
    counts: Seq[int], before: Seq[int] | None, wanted: Seq[float]
) -> list[float] | None:
    """Return quantiles (0.5, 0.99) of times counted since `before`; None if there are none.

    before: the same counter in an earlier snapshot, or None for all since the start.
    """
    since = [n - m for n, m in zip(counts, before)] if before is not None else list(counts)
    total = sum(since)
    if not total:
        return None
    return [_quantile(since, share * total) for share in wanted]


def _quantile(counts: Seq[int], rank: float) -> float:
    """Time below which `rank` of the counts are, interpolated within a bucket."""
    seen = 0
    for i, n in enumerate(counts):
        if n and seen + n >= rank:
            within = (rank - seen) / n
            return SHORTEST_S * math.pow(2.0, (i + within) / PER_DOUBLING)
        seen += n
    raise AssertionError(f"rank {rank} of {seen}")
