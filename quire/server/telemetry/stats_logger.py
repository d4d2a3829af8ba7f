"""Statistics log: a line now and then with the load and throughput of the server, unless idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from quire.core.snapshot import Snapshot
from quire.core.types import DraftCounts
from quire.server.telemetry.http_metrics import LOAD_COUNTER
from quire.server.telemetry.metric_specs import FINISH_REASONS
from quire.server.telemetry.shared_counters import SharedCounters

log = logging.getLogger(__name__)

MIN_DRAFT_STEPS = 1000
"""Steps of sequences with drafts after which their acceptance is judged."""

FetchSnapshot = Callable[[], Awaitable[Snapshot | None]]

LINE_FORMAT = (
    "prompts {prompt_tokens_per_s:.1f} tok/s, output {generation_tokens_per_s:.1f} tok/s; "
    "running {running}, waiting {waiting}; KV cache {kv_cache_usage:.1%} held, "
    "prefix cache hits {prefix_cache_hit_rate:.1%}"
)


class StatsLogger:
    """Logs rates between two snapshots of the engine."""

    def __init__(
        self,
        board: SharedCounters,
        look: FetchSnapshot,
        clock: Callable[[], float] = time.monotonic,
        name: str = "",
    ) -> None:
        """name: of the engine, at the start of each line."""
        self._name = name
        self._counters = board
        self._fetch_snapshot = look
        self._clock = clock
        self._finished_before = self._load_and_finished()[1]
        self._last_at = clock()
        self._last_snapshot: Snapshot | None = None
        self._has_warned = False

    async def log_every(self, seconds: float) -> None:
        """Log a line, for ever."""
        while True:
            await asyncio.sleep(seconds)
            if found := await self.build_line():
                for line in found[0].splitlines():
                    log.info(line, extra=found[1])

    async def build_line(self) -> tuple[str, dict[str, float]] | None:
        """The line since the last one, and its numbers; None: nothing happened.

        If drafts were verified, a second line follows.
        """
        load, ended = self._load_and_finished()
        idle, self._finished_before = not load and ended == self._finished_before, ended
        since, self._last_at = self._last_at, self._clock()
        if idle:
            return None
        before, now = self._last_snapshot, await self._fetch_snapshot()
        if now is None:
            return f"{self._name}the engine does not answer", {}
        self._last_snapshot = now
        seconds = max(self._last_at - since, 1e-9)
        rates = compute_rates(before, now, seconds)
        line = self._name + LINE_FORMAT.format(**rates)
        counted = _draft_counts_since(before, now)
        if counted.rows:
            line += f"\n{self._name}{format_drafts(counted, seconds)}"
        self._warn_of_useless_drafts(now.counters.draft_counts)
        return line, rates

    def _warn_of_useless_drafts(self, counts: DraftCounts) -> None:
        """Warn once if hardly a draft was accepted since the start."""
        accepted = sum(counts.accepted)
        if self._has_warned or counts.rows < MIN_DRAFT_STEPS or accepted >= counts.rows / 10:
            return
        self._has_warned = True
        log.warning(
            "%sof %d drafted tokens %d were accepted: a drafter with weights may be made for "
            "another model, and ngram and suffix need texts that repeat",
            self._name,
            counts.tokens,
            accepted,
        )

    def _load_and_finished(self) -> tuple[float, float]:
        """Requests under way, and sequences that have ended, in all API processes."""
        totals, place = self._counters.totals(), self._counters.index_by_name
        return totals[place[LOAD_COUNTER]], sum(
            totals[place[f"request_success {one}"]] for one in FINISH_REASONS
        )


def compute_rates(before: Snapshot | None, now: Snapshot, seconds: float) -> dict[str, float]:
    """Values of the line. before: None is the engine's start."""
    stats, counters = now.stats, now.counters
    if before is not None and counters.steps < before.counters.steps:
        before = None  # another engine has taken over: it counts from its own start
    rates: dict[str, float] = {
        "prompt_tokens_per_s": counters.prompt_tokens,
        "generation_tokens_per_s": counters.generated_tokens,
    }
    queries, hits = stats.prefix_query_tokens, stats.prefix_hit_tokens + stats.tier_hit_tokens
    if before is not None:
        rates["prompt_tokens_per_s"] -= before.counters.prompt_tokens
        rates["generation_tokens_per_s"] -= before.counters.generated_tokens
        queries -= before.stats.prefix_query_tokens
        hits -= before.stats.prefix_hit_tokens + before.stats.tier_hit_tokens
    rates = {name: tokens / seconds for name, tokens in rates.items()}
    return rates | {
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_cache_usage": stats.usage,
        "prefix_cache_hit_rate": hits / queries if queries else 0.0,
    }


def _draft_counts_since(before: Snapshot | None, now: Snapshot) -> DraftCounts:
    counts = now.counters.draft_counts
    if before is None or now.counters.steps < before.counters.steps:
        return counts
    old = before.counters.draft_counts
    padded = (*old.accepted, *(0,) * (len(counts.accepted) - len(old.accepted)))
    accepted = tuple(new - one for new, one in zip(counts.accepted, padded))
    return DraftCounts(counts.rows - old.rows, counts.tokens - old.tokens, accepted)


def format_drafts(counts: DraftCounts, seconds: float) -> str:
    """The part of the line about drafts, in vLLM's words. counts: of rows with drafts."""
    accepted = sum(counts.accepted)
    rates = ", ".join(f"{one / counts.rows:.3f}" for one in counts.accepted) or "0.000"
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / counts.rows:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {counts.tokens / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {counts.tokens} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {accepted / max(counts.tokens, 1):.1%}"
    )
