"""GET /quire/live: the engine as it is now, a few times a second, for as long as someone looks.

One call to the engine serves all who watch, and none is made while nobody does. A slow reader gets
the newest frame, never a queue of old ones. The block map is packed (deflate) and sent to each
reader only when it changed. Counters become rates in the browser; times become percentiles here.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.core.block_pool import BlockState
from quire.core.snapshot import Counters, Snapshot, percentiles
from quire.core.timing import CUTS
from quire.engine.client import EngineClient
from quire.server.sse import error_event, event

router = APIRouter(include_in_schema=False)

PERIOD_S = 0.33
ROWS = 200
"""Sequences that are told of one by one."""
WINDOW_S = 10.0
"""Percentiles are of what happened in so many seconds."""
SHARES = (0.5, 0.9, 0.99)
LARGE = 1 << 14
"""Maps of more blocks are packed outside the event loop."""


@router.get("/quire/live")
async def show_live(http: Request) -> Response:
    """Frames as events, until the reader goes away or the server ends."""
    feed = http.app.state.live
    assert isinstance(feed, Feed), feed
    return _Stream(feed.watch())


class _Stream(Response):
    """The events of one watch; a disconnect closes it."""

    media_type = "text/event-stream"

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_until_gone(receive, self._watch.close))
        try:
            headers = self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in self._watch:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            self._watch.close()


async def _until_gone(receive: Receive, close: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    close()


class Frame(NamedTuple):
    """One moment, encoded. `blocks` is the whole event with the map, `plain` the one without."""

    plain: bytes
    blocks: bytes
    map_number: int
    """Counts the maps that differ."""


class Feed:
    """All who watch one engine. Lives on the event loop."""

    def __init__(self, engine: EngineClient, period_s: float = PERIOD_S) -> None:
        self.frame: Frame | None = None
        self._engine = engine
        self._period_s = period_s
        self._watches: set[Watch] = set()
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._past: deque[tuple[float, Counters]] = deque()
        self._map = (b"", b"")
        self._map_number = 0

    def watch(self) -> Watch:
        """Begin to look. Whoever calls this calls close() in the end."""
        made = Watch(self)
        if self._ended:
            made.close()
            return made
        self._watches.add(made)
        if self._task is None:
            self._past.clear()
            self._task = asyncio.create_task(self._run())
        return made

    def end(self) -> None:
        """The server is about to end: let nobody wait for the next frame, now or later."""
        self._ended = True
        for watch in tuple(self._watches):
            watch.close()

    def leave(self, watch: Watch) -> None:
        """It looks no more."""
        self._watches.discard(watch)

    async def _run(self) -> None:
        """Ask and tell, until nobody looks."""
        try:
            while self._watches:
                self.frame = await self._look()
                for watch in self._watches:
                    watch.wake()
                await asyncio.sleep(self._period_s)
        except Exception as error:  # noqa: BLE001 - a border: it goes to those who look
            for watch in self._watches:
                watch.fail(error)
        finally:
            self._task = None

    async def _look(self) -> Frame:
        snapshot = await self._engine.snapshot(rows=ROWS, blocks=True)
        found = (snapshot.states, snapshot.owners)
        if found != self._map:
            self._map, self._map_number = found, self._map_number + 1
        told = self._told(snapshot)
        if len(snapshot.states) > LARGE:
            return await asyncio.to_thread(_frame, told, found, self._map_number)
        return _frame(told, found, self._map_number)

    def _told(self, snapshot: Snapshot) -> dict[str, Any]:
        before = self._counters_before(snapshot)
        told = describe(snapshot)
        now = snapshot.counters
        told["first"] = percentiles(now.first_token_times, before.first_token_times, SHARES)
        told["gap"] = percentiles(now.inter_token_times, before.inter_token_times, SHARES)
        return told

    def _counters_before(self, snapshot: Snapshot) -> Counters:
        """The counters of about WINDOW_S ago, or the oldest since someone looks."""
        if self._past and snapshot.counters.steps < self._past[-1][1].steps:
            self._past.clear()  # another engine has taken over: it counts from its own start
        self._past.append((snapshot.at, snapshot.counters))
        while snapshot.at - self._past[0][0] > WINDOW_S:
            self._past.popleft()
        return self._past[0][1]


class Watch:
    """One who looks: an async iterator of events. Closing it ends it."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._closed = False
        self._map_number = 0

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> bytes:
        await self._news.wait()
        self._news.clear()
        if self._closed:
            raise StopAsyncIteration
        if self._error is not None:
            self.close()
            return error_event(self._error)
        frame = self._feed.frame
        assert frame is not None, "woken without a frame"
        same, self._map_number = frame.map_number == self._map_number, frame.map_number
        return frame.plain if same else frame.blocks

    def wake(self) -> None:
        """There is a new frame."""
        self._news.set()

    def fail(self, error: Exception) -> None:
        """There will be none."""
        self._error = error
        self._news.set()

    def close(self) -> None:
        """End the iteration. Harmless when called again."""
        self._closed = True
        self._news.set()
        self._feed.leave(self)


def describe(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as the page reads it, without percentiles and map."""
    stats, counters = snapshot.stats, snapshot.counters
    return {
        "at": snapshot.at,
        "running": stats.running,
        "waiting": stats.waiting,
        "preempted": snapshot.preempted,
        "max_seqs": snapshot.max_seqs,
        "rows": [_row(row._asdict()) for row in snapshot.rows],
        "totals": {
            "prompt": counters.prompt_tokens,
            "generated": counters.generated_tokens,
            "steps": counters.steps,
            "finished": sum(counters.finished.values()),
            "preemptions": stats.preemptions,
            "queried": stats.prefix_query_tokens,
            "hit": stats.prefix_hit_tokens,
            "cuts": dict(zip(CUTS, counters.cut_seconds)),
        },
        "blocks": {
            "size": snapshot.block_size,
            "total": stats.blocks,
            "held": stats.held_blocks,
            "shared": snapshot.states.count(BlockState.SHARED),
            "cached": stats.cached_blocks,
            "free": stats.free_blocks,
        },
    }


def _row(row: dict[str, Any]) -> dict[str, Any]:
    row["id"] = row.pop("request_id").rpartition("-")[0]  # the one that its client knows
    row["seconds"] = round(row["seconds"], 3)
    return row


def _frame(told: dict[str, Any], found: tuple[bytes, bytes], number: int) -> Frame:
    """found: states and owners of the blocks; the page unpacks them one after the other."""
    packed = base64.b64encode(zlib.compress(b"".join(found), 1)).decode()
    return Frame(event(told), event({**told, "map": packed}), number)
