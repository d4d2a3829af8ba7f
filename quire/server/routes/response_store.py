"""Response store: keeps responses in the memory of this process, for GET, cancel and continuation.

They are kept as JSON, so that their size is known. The oldest is evicted when there are too many or
they take too much memory; one that still runs in the background never is. Nothing is written to
disk.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from quire.errors import Overloaded
from quire.server.formats.sse import KEEP_ALIVE_COMMENT
from quire.server.generation.generation_request import ChatMessageDict

MAX_BYTES = 256 << 20
RETRY_AFTER_S = 5.0

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class StoredResponse:
    """One response: its state, the conversation before it, and the events of its stream.

    live: the object while it runs; written by its ResponsesFormatter. tenant: its owner.
    """

    def __init__(
        self, live: dict[str, Any], *, keeps_events: bool = False, tenant: bytes = b""
    ) -> None:
        self.id = str(live["id"])
        self.tenant = tenant
        self.background = bool(live["background"])
        self.keeps_events = keeps_events
        self.cancel: Callable[[], None] | None = None
        self.size_bytes = 0  # bytes
        self._running_body: dict[str, Any] | None = live
        self._body = b""
        self._messages = b"[]"
        self._events: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return self._running_body is not None

    @property
    def body_json(self) -> bytes:
        """The response object, as JSON."""
        return self._body if self._running_body is None else _encode(self._running_body)

    @property
    def status(self) -> str:
        """The status of the response object."""
        return str(_decode(self.body_json)["status"])

    @property
    def conversation(self) -> list[ChatMessageDict]:
        """The conversation so far, without instructions, with the model's last answer."""
        found: list[ChatMessageDict] = _decode(self._messages)
        return found

    def add_events(self, events: list[bytes]) -> None:
        """More events of its stream."""
        if self.keeps_events and events:
            self._events += events
            self.size_bytes += sum(map(len, events))
            self._wake()

    def mark_ended(self, messages: list[ChatMessageDict]) -> None:
        """Mark the stream as complete."""
        self._body, self._messages = self.body_json, _encode(messages)
        self.size_bytes += len(self._body) + len(self._messages)
        self._running_body = self.cancel = None
        self._wake()

    async def wait_until_ended(self) -> None:
        """Wait for its end."""
        while self.is_running:
            await self._changed.wait()

    async def events(self, start: int, keep_alive_s: float = 0) -> AsyncIterator[bytes]:
        """Its events from number `start` on, until it ends; comments meanwhile."""
        while True:
            news = self._changed
            while start < len(self._events):
                batch = self._events[start:]
                start += len(batch)
                yield b"".join(batch)
            if not self.is_running:
                return
            try:
                await asyncio.wait_for(news.wait(), keep_alive_s or None)
            except asyncio.TimeoutError:
                yield KEEP_ALIVE_COMMENT

    def _wake(self) -> None:
        news, self._changed = self._changed, asyncio.Event()
        news.set()


class ResponseStore:
    """By id, oldest first. Used by the event loop's thread alone."""

    def __init__(self, most: int, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses = most
        self._max_bytes = max_bytes
        self._responses: dict[str, StoredResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, one: StoredResponse) -> None:
        """Keep it. Raises Overloaded if as many as may be kept still run."""
        if (
            one.is_running
            and sum(other.is_running for other in self._responses.values()) >= self.max_responses
        ):
            message = f"{self.max_responses} responses run in the background already"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        self._responses[one.id] = one
        self.evict_excess()

    def evict_excess(self) -> None:
        """Let the oldest go, as far as there are too many. What still runs does not count."""
        ended = [one for one in self._responses.values() if not one.is_running]
        weight = sum(one.size_bytes for one in ended)
        excess = len(ended) - self.max_responses
        for one in ended:
            if excess <= 0 and weight <= self._max_bytes:
                return
            excess -= 1
            weight -= one.size_bytes
            del self._responses[one.id]

    def make_unique_id(self, wanted: str) -> str:
        """The id, or one like it if it is taken: clients may send one X-Request-Id twice."""
        if wanted not in self._responses:
            return wanted
        return next(
            one for i in itertools.count(2) if (one := f"{wanted}_{i}") not in self._responses
        )

    def get(self, response_id: str, tenant: bytes = b"") -> StoredResponse:
        """Raises HTTPException 404 if it is not kept (any more), or is another's."""
        found = self._responses.get(response_id)
        if found is None or found.tenant != tenant:
            raise HTTPException(404, f"no response {response_id!r:.100} is kept here")
        return found

    def remove(self, one: StoredResponse) -> None:
        """Forget it; what still runs is ended."""
        if one.cancel is not None:
            one.cancel()
        self._responses.pop(one.id, None)

    def run_in_background(self, task: asyncio.Task[None]) -> None:
        """Hold a task of the background till it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what runs in the background."""
        for one in list(self._responses.values()):
            if one.cancel is not None:
                one.cancel()
        await asyncio.gather(*self._tasks)
