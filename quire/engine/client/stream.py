"""Streams of updates: the client's state of requests that have not ended.

Updates come from quire.engine.client.engine_client, which implements `StreamOwner`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.core.types import Request, Update
from quire.engine.client.delivered_tokens import (
    DeliveredTokens,
    exceeds_crash_limit,
    resumed_request,
)
from quire.engine.coalesce_updates import coalesce


class StreamOwner(Protocol):
    """The methods of the client that a stream calls."""

    def end_sequence(self, request_id: str, index: int) -> None:
        """Have the engine end a sequence: its text is complete."""
        ...

    def remove_stream(self, stream: RequestStream, unfinished_ids: tuple[str, ...]) -> None:
        """Remove a stream that is closed, and abort its unfinished requests."""
        ...

    def block_input(self, request: Request) -> bytes:
        """Refuse the input of this request for a while. Returns its fingerprint."""
        ...


class RequestStream:
    """The updates of some requests, as they arrive. Written by the thread of the event loop alone.

    Each iteration yields the updates since the last one, at most one per sequence (several are
    coalesced). It ends when every sequence has ended. While the engine is being restarted it
    yields an empty list every KEEPALIVE_S. The caller must call close(), which aborts the rest.
    """

    def __init__(self, owner: StreamOwner, requests: tuple[Request, ...]) -> None:
        self._owner = owner
        self._requests = requests
        self._unfinished = {
            (r.id, index): DeliveredTokens() for r in requests for index in range(r.n)
        }
        self._add_call_id: int | None = None  # of its AddRequests, until that is answered
        self._accepted_at = time.monotonic()
        self._crash_counts: dict[str, int] = {}  # by request: engines that died while they ran it
        self._keepalive_due = False
        self._pending: dict[tuple[str, int], list[Update]] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.request_ids = tuple(r.id for r in requests)
        self.closed = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[Update]:
        while (found := self._take()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return found

    def _take(self) -> list[Update] | None:
        """Return the updates since the last call, [] for a keepalive; None: there are none.

        Raises the error of the stream, and StopAsyncIteration at its end.
        """
        if self._pending:
            pending, self._pending = self._pending, {}
            return [one[0] if len(one) == 1 else coalesce(one) for one in pending.values()]
        if self._keepalive_due:
            self._keepalive_due = False
            return []
        if self._error is not None:
            raise self._error
        if self.closed or not self._unfinished:
            raise StopAsyncIteration
        return None

    @property
    def unfinished_requests(self) -> tuple[Request, ...]:
        """Requests with sequences that have not ended."""
        ids = {request_id for request_id, _ in self._unfinished}
        return tuple(one for one in self._requests if one.id in ids)

    @property
    def unfinished_ids(self) -> tuple[str, ...]:
        """Ids of requests with sequences that have not ended."""
        return tuple({request_id for request_id, _ in self._unfinished})

    def end_sequence(self, request_id: str, index: int) -> None:
        """End a sequence: its text is complete (a stop string). No update follows."""
        if self._unfinished.pop((request_id, index), None) is not None:
            self._owner.end_sequence(request_id, index)

    def close(self) -> None:
        """Abort what has not ended, and end the iteration. Harmless when called again."""
        if self.closed:
            return
        self.closed = True
        self._pending.clear()
        self._wake()
        self._owner.remove_stream(self, self.unfinished_ids)

    def _push(self, update: Update) -> None:
        place = (update.request_id, update.index)
        delivered = self._unfinished.get(place)
        if delivered is None:
            return  # it was ended here while the update was in flight
        if update.finish is not None:
            del self._unfinished[place]
            if update.fault == "step":
                self._owner.block_input(self._request(update.request_id))
        else:
            delivered.tokens.extend(update.token_ids)
            if update.timing is not None:
                delivered.timing = update.timing
        pending = self._pending.get(place)
        if pending is None:
            self._pending[place] = [update]
        else:
            pending.append(update)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _request(self, request_id: str) -> Request:
        return next(one for one in self._requests if one.id == request_id)

    def _send_keepalive(self) -> None:
        self._keepalive_due = True
        self._wake()

    def _requests_to_resume(self) -> list[Request]:
        """Its unfinished requests, for another engine."""
        ids = {request_id for request_id, _ in self._unfinished}
        deaths = self._crash_counts
        found = [one for one in self._requests if one.id in ids]
        return [resumed_request(one, self._unfinished, deaths.get(one.id, 0)) for one in found]

    @property
    def _max_crash_count(self) -> int:
        return max(self._crash_counts.values(), default=0)

    def _requests_delivered_at_most(self, count: int) -> list[Request]:
        """Its unfinished requests with so many delivered tokens at most."""
        live = self.unfinished_ids
        return [
            one for one in self._requests if one.id in live and self._delivered_count(one) <= count
        ]

    def _delivered_count(self, request: Request) -> int:
        """Delivered tokens of its longest unfinished sequence."""
        places = [(request.id, index) for index in range(request.n)]
        return max(
            len(self._unfinished[place].tokens) for place in places if place in self._unfinished
        )

    def _close_timings(self, lost_at: float) -> None:
        """End the timing of its unfinished sequences. lost_at: the engine's last message came."""
        for delivered in self._unfinished.values():
            delivered.close_timing(self._accepted_at, lost_at)

    def _record_crash(self, running: frozenset[str] | None) -> Request | None:
        """Count the death of an engine that ran these requests; None: any. Returns the culprit."""
        worst = None
        unfinished_ids = self.unfinished_ids
        for request in self._requests:
            if request.id in unfinished_ids and (running is None or request.id in running):
                deaths = self._crash_counts[request.id] = self._crash_counts.get(request.id, 0) + 1
                alone = running is not None and len(running) == 1
                worst = request if exceeds_crash_limit(deaths, alone=alone) else worst
        return worst

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._unfinished.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamGroup:
    """Streams of one call, whose requests run on several engines, as one RequestStream."""

    def __init__(self, streams: Iterable[RequestStream], request_ids: Sequence[str]) -> None:
        """request_ids: of all streams, in the order of the call."""
        self._open = list(streams)
        self._stream_by_id = {one: stream for stream in self._open for one in stream.request_ids}
        self.request_ids = tuple(request_ids)
        self.closed = False

    def __aiter__(self) -> StreamGroup:
        return self

    async def __anext__(self) -> list[Update]:
        while True:
            batches = []
            for stream in list(self._open):
                try:
                    found = stream._take()
                except StopAsyncIteration:
                    self._open.remove(stream)
                else:
                    batches += [] if found is None else [found]
            if batches:
                return [update for batch in batches for update in batch]
            if not self._open:
                raise StopAsyncIteration
            waiter = asyncio.get_running_loop().create_future()
            for stream in self._open:
                stream._waiter = waiter
            await waiter

    def end_sequence(self, request_id: str, index: int) -> None:
        """As RequestStream.end_sequence()."""
        self._stream_by_id[request_id].end_sequence(request_id, index)

    def close(self) -> None:
        """Abort what has not ended, and end the iteration. Harmless when called again."""
        self.closed = True
        for stream in set(self._stream_by_id.values()):
            stream.close()
