"""A line now and then that says how much the server does; none while it does nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from quire.core.snapshot import Snapshot
from quire.server.board import Board
from quire.server.http_metrics import LOAD
from quire.server.metric_names import REASONS

log = logging.getLogger(__name__)

Look = Callable[[], Awaitable[Snapshot | None]]

WORDS = (
    "prompts {prompt_tokens_per_s:.1f} tok/s, output {generation_tokens_per_s:.1f} tok/s; "
    "running {running}, waiting {waiting}; KV cache {kv_cache_usage:.1%} held, "
    "prefix cache hits {prefix_cache_hit_rate:.1%}"
)


class Statistics:
    """Looks at the engine, and remembers the look before."""

    def __init__(
        self, board: Board, look: Look, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._board = board
        self._look = look
        self._clock = clock
        self._ended = self._under_way()[1]
        self._at = clock()
        self._before: Snapshot | None = None

    async def tell_every(self, seconds: float) -> None:
        """Log a line, for ever."""
        while True:
            await asyncio.sleep(seconds)
            if told := await self.line():
                log.info(told[0], extra=told[1])

    async def line(self) -> tuple[str, dict[str, float]] | None:
        """What happened since the last time, in words and in numbers. None: nothing did."""
        load, ended = self._under_way()
        idle, self._ended = not load and ended == self._ended, ended
        since, self._at = self._at, self._clock()
        if idle:
            return None
        before, now = self._before, await self._look()
        if now is None:
            return "the engine does not answer", {}
        self._before = now
        said = rates(before, now, max(self._at - since, 1e-9))
        return WORDS.format(**said), said

    def _under_way(self) -> tuple[float, float]:
        """Requests under way, and sequences that have ended, in all API processes."""
        totals, place = self._board.totals(), self._board.place
        return totals[place[LOAD]], sum(totals[place[f"request_success {one}"]] for one in REASONS)


def rates(before: Snapshot | None, now: Snapshot, seconds: float) -> dict[str, float]:
    """What the line says. before: None is the engine's start."""
    stats, counters = now.stats, now.counters
    if before is not None and counters.steps < before.counters.steps:
        before = None  # another engine has taken over: it counts from its own start
    said: dict[str, float] = {
        "prompt_tokens_per_s": counters.prompt_tokens,
        "generation_tokens_per_s": counters.generated_tokens,
    }
    queries, hits = stats.prefix_query_tokens, stats.prefix_hit_tokens
    if before is not None:
        said["prompt_tokens_per_s"] -= before.counters.prompt_tokens
        said["generation_tokens_per_s"] -= before.counters.generated_tokens
        queries -= before.stats.prefix_query_tokens
        hits -= before.stats.prefix_hit_tokens
    said = {name: tokens / seconds for name, tokens in said.items()}
    return said | {
        "running": stats.running,
        "waiting": stats.waiting + stats.swapped,
        "kv_cache_usage": stats.usage,
        "prefix_cache_hit_rate": hits / queries if queries else 0.0,
    }
