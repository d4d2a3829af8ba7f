"""The async face of the engine, and the only door to it from the server.

Below it is a transport: the engine's thread in this process (quire.engine.thread) or a socket to
its own process (quire.engine.remote); nothing above knows which. The one idea: a `Stream` owns its
requests, and closing it early aborts them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from quire.core.snapshot import Snapshot
from quire.core.stats import SchedulerStats
from quire.core.types import Request, Update
from quire.engine.merge import merged
from quire.engine.messages import (
    Abort,
    AbortSequence,
    Add,
    Answer,
    Beat,
    Call,
    Carried,
    Dead,
    FromEngine,
    News,
    ToEngine,
    carried,
    error_of,
)
from quire.errors import EngineDead, EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Transport(Protocol):
    """Carries messages to an engine and back."""

    def start(
        self, deliver: Callable[[FromEngine], None], die: Callable[[EngineDead], None]
    ) -> None:
        """Begin, on the event loop that will use it: deliver and die are called there."""
        ...

    def send(self, message: ToEngine) -> None: ...

    async def stop(self) -> None:
        """End it, and the engine if that is its own."""
        ...

    def close(self) -> None:
        """Carry nothing more; waits for nothing."""
        ...


class Observer(Protocol):
    """Is told what passes a client, synchronously."""

    def opened(self, requests: Sequence[Request]) -> None:
        """The engine has accepted these; none of their updates was delivered yet."""
        ...

    def news(self, updates: Sequence[Update]) -> None:
        """All that came for this process, also of streams that are closed."""
        ...

    def ended(self, request_id: str, index: int) -> None:
        """A sequence was ended here, by a stop string: no update follows."""
        ...


class Stream:
    """Updates of some requests, as they come. Written by the event loop's thread alone.

    Iteration yields what arrived since the last time, one update a sequence (those that piled up
    are merged), and ends when every sequence has ended. Whoever opened it calls close(): it aborts
    what has not ended.
    """

    def __init__(self, client: EngineClient, requests: tuple[Request, ...]) -> None:
        self._client = client
        self._live = {(r.id, index) for r in requests for index in range(r.n)}
        self._pending: dict[tuple[str, int], list[Update]] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.request_ids = tuple(r.id for r in requests)
        self.closed = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Update]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.closed or not self._live:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pending, self._pending = self._pending, {}
        return [one[0] if len(one) == 1 else merged(one) for one in pending.values()]

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Ids of requests with sequences that have not ended."""
        return tuple({request_id for request_id, _ in self._live})

    def end_sequence(self, request_id: str, index: int) -> None:
        """Its text is complete (a stop string): the engine need not go on."""
        if (request_id, index) in self._live:
            self._live.discard((request_id, index))
            self._client._end_sequence(request_id, index)

    def close(self) -> None:
        """Abort what has not ended, and end the iteration. Harmless when called again."""
        if self.closed:
            return
        self.closed = True
        self._pending.clear()
        self._wake()
        self._client._forget(self, self.unfinished)

    def _push(self, update: Update) -> None:
        place = (update.request_id, update.index)
        if place not in self._live:
            return  # it was ended here while this was under way
        if update.finish is not None:
            self._live.discard(place)
        news = self._pending.get(place)
        if news is None:
            self._pending[place] = [update]
        else:
            news.append(update)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._live.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Speaks to one engine. All of it runs on one event loop."""

    def __init__(
        self, transport: Transport, *, on_death: Callable[[EngineDead], None] | None = None
    ) -> None:
        self.on_death = on_death
        self.transport = transport
        self.beat = time.monotonic()
        """When the engine last gave a sign of life."""
        self.observer: Observer | None = None
        self._streams: dict[str, Stream] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._opening: dict[int, tuple[Request, ...]] = {}  # by the number of their Add
        self._numbers = itertools.count()
        self._asleep: frozenset[str] = frozenset()
        self._dead: EngineDead | None = None

    def start(self) -> None:
        """Begin. Called once, on the event loop that will use the client."""
        self.beat = time.monotonic()
        self.transport.start(self._deliver, self._die)

    async def stop(self) -> None:
        """End the transport; streams still open fail with EngineDead."""
        await self.transport.stop()
        self._bury(EngineDead("the engine was shut down"))

    @property
    def dead(self) -> EngineDead | None:
        """Why nothing more will be answered, or None while the engine lives."""
        return self._dead

    # -- requests -----------------------------------------------------------------------------

    async def generate(self, requests: Iterable[Request]) -> Stream:
        """Hand requests to the engine, all or none; their updates come through the Stream.

        Returns when the engine has accepted them. Raises RequestError (TooLong ...), EngineDead.
        """
        all_of_them = tuple(requests)
        travelling = [carried(one) for one in all_of_them]
        stream = Stream(self, all_of_them)
        for request_id in stream.request_ids:
            assert request_id not in self._streams, f"two requests with the id {request_id}"
            self._streams[request_id] = stream
        try:
            await self._ask(lambda number: self._adding(number, all_of_them, travelling))
        except BaseException:
            stream.close()  # also when the caller gave up while we waited
            raise
        return stream

    def _adding(
        self, number: int, requests: tuple[Request, ...], travelling: list[Carried]
    ) -> ToEngine:
        self._opening[number] = requests
        return Add(number, travelling)

    def end_streams(self, error: EngineError) -> None:
        """Abort everything that is open; each stream raises `error`. New ones may be opened."""
        for stream in set(self._streams.values()):
            unfinished = stream.unfinished
            stream._fail(error)
            self._forget(stream, unfinished)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now; their streams get the terminal updates. Unknown ids are ignored."""
        self._tell(Abort(list(request_ids)))

    async def abort_named(self, names: Iterable[str]) -> int:
        """End requests, whoever made them, whose id without its last -N is one of these names.

        Their streams get the terminal updates. Returns how many requests there were.
        """
        return await self._call(int, "abort_named", list(names))

    # -- the engine between requests ------------------------------------------------------------

    async def stats(self) -> SchedulerStats:
        """Counts of the scheduler, between two steps."""
        return await self._call(SchedulerStats, "stats")

    async def snapshot(self, rows: int = 0, blocks: bool = False) -> Snapshot:
        """The engine at this moment: the first so many rows, and the map of blocks if asked for."""
        return await self._call(Snapshot, "snapshot", rows, blocks)

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget cached prefixes. False if blocks are in use. reset_running: end all first."""
        return await self._call(bool, "reset_prefix_cache", reset_running)

    async def check(self) -> None:
        """Prove the invariants of pool and cache. Raises AssertionError."""
        await self._call(type(None), "check")

    @property
    def asleep(self) -> bool:
        """The engine was sent to sleep, or is paused."""
        return bool(self._asleep)

    @property
    def sleeping(self) -> frozenset[str]:
        """What sleeps, of weights, kv_cache and scheduling."""
        return self._asleep

    @property
    def paused(self) -> bool:
        """No steps are made: new requests are accepted and wait."""
        return "scheduling" in self._asleep

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Stop making steps. Level 1 also forgets the KV cache; requests are refused till woken.

        mode, for what runs: "abort" ends it, "wait" lets it end first, "keep" (level 0) freezes it.
        """
        await self._fall_asleep(level, mode, clear_cache=False)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Undo sleep, for some tags (weights, kv_cache, scheduling) or all. True: fully awake."""
        left = await self._call(list[str], "wake_up", None if tags is None else list(tags))
        self._asleep = frozenset(left)
        return not left

    async def pause(self, mode: str = "abort", *, clear_cache: bool = False) -> None:
        """Make no steps until resume(). New requests wait. mode: as for sleep()."""
        await self._fall_asleep(0, mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """Go on after pause()."""
        await self.wake_up()

    async def start_profile(self) -> None:
        """Record a trace in the engine's process until stop_profile()."""
        await self._call(type(None), "start_profile")

    async def stop_profile(self) -> str:
        """Write the trace; its path there."""
        return await self._call(str, "stop_profile")

    async def _fall_asleep(self, level: int, mode: str, *, clear_cache: bool) -> None:
        left = await self._call(list[str], "sleep", level, mode, clear_cache)
        self._asleep = frozenset(left)

    # -- below: words to and from the transport ---------------------------------------------------

    async def _call(self, kind: type[T], name: str, *args: Any) -> T:
        value = await self._ask(lambda number: Call(number, name, list(args)))
        return msgspec.convert(value, kind, from_attributes=True)

    async def _ask(self, message: Callable[[int], ToEngine]) -> Any:
        if self._dead is not None:
            raise self._dead
        number = next(self._numbers)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = reply
        try:
            self.transport.send(message(number))
            return await reply
        finally:
            self._asked.pop(number, None)

    def _end_sequence(self, request_id: str, index: int) -> None:
        self._tell(AbortSequence(request_id, index))
        if self.observer is not None:
            self.observer.ended(request_id, index)

    def _tell(self, message: ToEngine) -> None:
        if self._dead is None:
            self.transport.send(message)

    def _forget(self, stream: Stream, unfinished: tuple[str, ...]) -> None:
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)
        if unfinished:
            self._tell(Abort(list(unfinished)))

    def _deliver(self, message: FromEngine) -> None:
        self.beat = time.monotonic()
        if isinstance(message, News):
            for answer in message.answers:
                self._settle(answer)
            if self.observer is not None and message.updates:
                self.observer.news(message.updates)
            streams = self._streams
            for update in message.updates:
                stream = streams.get(update.request_id)
                if stream is not None:
                    stream._push(update)
        elif isinstance(message, Beat):
            self._asleep = frozenset(message.asleep)
        elif isinstance(message, Dead):
            self._die(EngineDead(message.why))

    def _settle(self, answer: Answer) -> None:
        opened = self._opening.pop(answer.number, None)
        if opened is not None and answer.fault is None and self.observer is not None:
            self.observer.opened(opened)
        reply = self._asked.get(answer.number)
        if reply is None or reply.done():
            return  # who asked has gone
        if answer.fault is None:
            reply.set_result(answer.value)
        else:
            reply.set_exception(error_of(answer.fault))

    def _die(self, dead: EngineDead) -> None:
        if self._dead is not None:
            return
        self._bury(dead)
        if self.on_death is not None:
            self.on_death(dead)

    def _bury(self, dead: EngineDead) -> None:
        """Nothing will be answered any more: say so to everyone who waits."""
        if self._dead is not None:
            return
        self._dead = dead
        for reply in self._asked.values():
            if not reply.done():
                reply.set_exception(dead)
        for stream in set(self._streams.values()):
            stream._fail(dead)
        self._streams.clear()
