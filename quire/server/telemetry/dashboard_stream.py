"""GET /quire/live: streams snapshots of the engine, a few times a second.

One call to the engine serves all watchers, and none is made without a watcher. A slow watcher gets
the newest frame, never a queue of old ones. The block map is packed (deflate) and sent to each
watcher only when it changed. The browser turns counters into rates; percentiles are computed here.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import APIRouter, HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.core.kv.block_pool import BlockState
from quire.core.sequence_timing import BREAKDOWN_FIELDS
from quire.core.snapshot import EngineCounters, Snapshot, percentiles
from quire.engine.client.engine_pool import EnginePool
from quire.server.formats.sse import encode_sse, encode_sse_error

router = APIRouter(include_in_schema=False)

PERIOD_S = 0.33
MAX_ROWS = 200
"""Sequences that are listed one by one."""
WINDOW_S = 10.0
"""Percentiles are of what happened in so many seconds."""
QUANTILES = (0.5, 0.9, 0.99)
LARGE_MAP_BLOCKS = 1 << 14
"""Maps of more blocks are packed outside the event loop."""


@router.get("/quire/live")
async def show_live(http: Request) -> Response:
    """Frames of one engine as events, until the reader goes away or the server ends."""
    feeds, wanted = http.app.state.live, http.query_params.get("engine", "0")
    if not wanted.isdecimal() or int(wanted) >= len(feeds):
        raise HTTPException(404, f"there is no engine {wanted[:9]!r}: there are {len(feeds)}")
    feed = feeds[int(wanted)]
    assert isinstance(feed, SnapshotFeed), feed
    return _DashboardResponse(feed.subscribe())


class _DashboardResponse(Response):
    """The events of one watch; a disconnect closes it."""

    media_type = "text/event-stream"

    def __init__(self, watch: SnapshotWatcher) -> None:
        self._watcher = watch
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_close_on_disconnect(receive, self._watcher.close))
        try:
            headers = self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in self._watcher:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            self._watcher.close()


async def _close_on_disconnect(receive: Receive, close: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    close()


class DashboardFrame(NamedTuple):
    """One moment, encoded. `blocks` is the whole event with the map, `plain` the one without."""

    without_block_map: bytes
    with_block_map: bytes
    block_map_version: int
    """Counts the maps that differ."""


def build_feeds(engines: EnginePool) -> list[SnapshotFeed]:
    """Return a feed of each engine."""
    return [SnapshotFeed(engines, index) for index in range(len(engines.clients))]


class SnapshotFeed:
    """All watchers of one engine. Runs on the event loop."""

    def __init__(self, engines: EnginePool, index: int = 0, period_s: float = PERIOD_S) -> None:
        self.frame: DashboardFrame | None = None
        self._engines, self._index = engines, index
        self._period_s = period_s
        self._watchers: set[SnapshotWatcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._counter_history: deque[tuple[float, EngineCounters]] = deque()
        self._block_map = (b"", b"")
        self._block_map_version = 0

    def subscribe(self) -> SnapshotWatcher:
        """Subscribe to snapshots. The caller must call close() in the end."""
        made = SnapshotWatcher(self)
        if self._ended:
            made.close()
            return made
        self._watchers.add(made)
        if self._task is None:
            self._counter_history.clear()
            self._task = asyncio.create_task(self._run())
        return made

    def shut_down(self) -> None:
        """The server is about to end: end all watchers, now and later."""
        self._ended = True
        for subscribe in tuple(self._watchers):
            subscribe.close()

    def unsubscribe(self, watch: SnapshotWatcher) -> None:
        """Send it no more frames."""
        self._watchers.discard(watch)

    async def _run(self) -> None:
        """Take and send frames until there is no watcher."""
        try:
            while self._watchers:
                self.frame = await self._take_frame()
                for subscribe in self._watchers:
                    subscribe.wake()
                await asyncio.sleep(self._period_s)
        except Exception as error:  # noqa: BLE001 - it is sent to the watchers
            for subscribe in self._watchers:
                subscribe.fail(error)
        finally:
            self._task = None

    async def _take_frame(self) -> DashboardFrame:
        snapshot = await self._engines.snapshot(MAX_ROWS, True, engine=self._index)
        found = (snapshot.block_states, snapshot.block_owners)
        if found != self._block_map:
            self._block_map, self._block_map_version = found, self._block_map_version + 1
        shown = self._describe_now(snapshot)
        if len(snapshot.block_states) > LARGE_MAP_BLOCKS:
            return await asyncio.to_thread(_encode_frame, shown, found, self._block_map_version)
        return _encode_frame(shown, found, self._block_map_version)

    def _describe_now(self, snapshot: Snapshot) -> dict[str, Any]:
        before = self._counters_before(snapshot)
        shown = describe_snapshot(snapshot)
        shown["engines"] = len(self._engines.clients)
        now = snapshot.counters
        shown["first"] = percentiles(now.first_token_times, before.first_token_times, QUANTILES)
        shown["gap"] = percentiles(now.inter_token_times, before.inter_token_times, QUANTILES)
        return shown

    def _counters_before(self, snapshot: Snapshot) -> EngineCounters:
        """The counters of about WINDOW_S ago, or the oldest since the first watcher came."""
        if self._counter_history and snapshot.counters.steps < self._counter_history[-1][1].steps:
            self._counter_history.clear()  # a restarted engine counts from zero
        self._counter_history.append((snapshot.at, snapshot.counters))
        while snapshot.at - self._counter_history[0][0] > WINDOW_S:
            self._counter_history.popleft()
        return self._counter_history[0][1]


class SnapshotWatcher:
    """A watcher: an async iterator of events. Closing it ends it."""

    def __init__(self, feed: SnapshotFeed) -> None:
        self._feed = feed
        self._frame_ready = asyncio.Event()
        self._error: Exception | None = None
        self._closed = False
        self._block_map_version = 0

    def __aiter__(self) -> SnapshotWatcher:
        return self

    async def __anext__(self) -> bytes:
        await self._frame_ready.wait()
        self._frame_ready.clear()
        if self._closed:
            raise StopAsyncIteration
        if self._error is not None:
            self.close()
            return encode_sse_error(self._error)
        frame = self._feed.frame
        assert frame is not None, "woken without a frame"
        same, self._block_map_version = (
            frame.block_map_version == self._block_map_version,
            frame.block_map_version,
        )
        return frame.without_block_map if same else frame.with_block_map

    def wake(self) -> None:
        """There is a new frame."""
        self._frame_ready.set()

    def fail(self, error: Exception) -> None:
        """There will be none."""
        self._error = error
        self._frame_ready.set()

    def close(self) -> None:
        """End the iteration. Harmless when called again."""
        self._closed = True
        self._frame_ready.set()
        self._feed.unsubscribe(self)


def describe_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as the page reads it, without percentiles and map."""
    stats, counters = snapshot.stats, snapshot.counters
    return {
        "at": snapshot.at,
        "running": stats.running,
        "waiting": stats.waiting,
        "preempted": snapshot.preempted,
        "max_seqs": snapshot.max_seqs,
        "rows": [_describe_row(row._asdict()) for row in snapshot.rows],
        "totals": {
            "prompt": counters.prompt_tokens,
            "generated": counters.generated_tokens,
            "steps": counters.steps,
            "finished": sum(counters.finished.values()),
            "preemptions": stats.preemptions,
            "queried": stats.prefix_query_tokens,
            "hit": stats.prefix_hit_tokens + stats.tier_hit_tokens,
            "draft_rows": counters.draft_counts.rows,
            "drafted": counters.draft_counts.tokens,
            "accepted": sum(counters.draft_counts.accepted),
            "cuts": dict(zip(BREAKDOWN_FIELDS, counters.breakdown_seconds)),
        },
        "blocks": {
            "size": snapshot.block_size,
            "total": stats.blocks,
            "held": stats.held_blocks,
            "shared": snapshot.block_states.count(BlockState.SHARED),
            "cached": stats.cached_blocks,
            "free": stats.free_blocks,
        },
    }


def _describe_row(row: dict[str, Any]) -> dict[str, Any]:
    row["id"] = row.pop("request_id").rpartition("-")[0]  # the id that its client has
    row["seconds"] = round(row["seconds"], 3)
    return row


def _encode_frame(shown: dict[str, Any], found: tuple[bytes, bytes], number: int) -> DashboardFrame:
    """found: states and owners of the blocks; the page unpacks them one after the other."""
    packed = base64.b64encode(zlib.compress(b"".join(found), 1)).decode()
    return DashboardFrame(encode_sse(shown), encode_sse({**shown, "map": packed}), number)
