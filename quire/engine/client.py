"""The async face of the engine, and the only door to it from the server.

The synchronous loop runs in a thread of its own. Messages go in through one queue; what a step
yields comes out in one `call_soon_threadsafe`, whatever the number of requests. While there is
nothing to do the thread sleeps in the queue. The one idea: a `Stream` owns its requests, and
closing it early aborts them.

A process boundary will go where the queue is; nothing outside this file knows which it is.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from quire.core.scheduler import SchedulerStats
from quire.core.types import Request, Update
from quire.engine.loop import Engine
from quire.errors import EngineDead, EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Ask:
    """Run `what(engine)` between two steps and answer."""

    what: Callable[[Engine], Any]
    reply: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _AbortSequence:
    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class _Quit:
    """The thread ends."""


_Message = _Ask | _Abort | _AbortSequence | _Quit


class _Answer(NamedTuple):
    reply: asyncio.Future[Any]
    value: Any = None
    error: Exception | None = None


class Stream:
    """Updates of some requests, as they come. Written by the event loop's thread alone.

    Iteration yields what arrived since the last time, oldest first, and ends when every sequence
    has ended. Whoever opened it calls close(): it aborts what has not ended.
    """

    def __init__(self, client: EngineClient, requests: tuple[Request, ...]) -> None:
        self._client = client
        self._live = {(r.id, index) for r in requests for index in range(r.n)}
        self._pending: list[Update] = []
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
        batch, self._pending = self._pending, []
        return batch

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Ids of requests with sequences that have not ended."""
        return tuple({request_id for request_id, _ in self._live})

    def end_sequence(self, request_id: str, index: int) -> None:
        """Its text is complete (a stop string): the engine need not go on."""
        if (request_id, index) in self._live:
            self._live.discard((request_id, index))
            self._client._tell(_AbortSequence(request_id, index))

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
        self._pending.append(update)
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._live.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Starts the engine's thread, speaks to it, and ends it."""

    def __init__(
        self, engine: Engine, *, on_death: Callable[[EngineDead], None] | None = None
    ) -> None:
        self.on_death = on_death
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._dead: EngineDead | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: list[_Answer] = []  # these two: the engine's thread, till its turn ends
        self._news: list[Update] = []

    def start(self) -> None:
        """Begin. Called once, on the event loop that will use the client."""
        assert self._thread is None, "start() was called twice"
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its step; streams still open fail with EngineDead."""
        if self._thread is None:
            return
        self._inbox.put(_Quit())
        await asyncio.to_thread(self._thread.join)
        self._bury(EngineDead("the engine was shut down"))

    @property
    def dead(self) -> EngineDead | None:
        """Why nothing more will be answered, or None while the engine lives."""
        return self._dead

    async def generate(self, requests: Iterable[Request]) -> Stream:
        """Hand requests to the engine, all or none; their updates come through the Stream.

        Returns when the engine has accepted them. Raises RequestError (TooLong ...), EngineDead.
        """
        all_of_them = tuple(requests)
        stream = Stream(self, all_of_them)
        for request_id in stream.request_ids:
            assert request_id not in self._streams, f"two requests with the id {request_id}"
            self._streams[request_id] = stream
        try:
            await self._ask(lambda engine: _add_all(engine, all_of_them))
        except BaseException:
            stream.close()  # also when the caller gave up while we waited
            raise
        return stream

    def end_streams(self, error: EngineError) -> None:
        """Abort everything that is open; each stream raises `error`. New ones may be opened."""
        for stream in set(self._streams.values()):
            unfinished = stream.unfinished
            stream._fail(error)
            self._forget(stream, unfinished)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now; their streams get the terminal updates. Unknown ids are ignored."""
        self._tell(_Abort(tuple(request_ids)))

    async def stats(self) -> SchedulerStats:
        """Counts of the scheduler, between two steps."""
        return await self._ask(Engine.stats)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False if blocks are in use."""
        return await self._ask(Engine.reset_prefix_cache)

    async def check(self) -> None:
        """Prove the invariants of pool and cache. Raises AssertionError."""
        await self._ask(Engine.check)

    async def _ask(self, what: Callable[[Engine], T]) -> T:
        if self._dead is not None:
            raise self._dead
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._inbox.put(_Ask(what, reply))
        return await reply

    def _tell(self, message: _Message) -> None:
        if self._dead is None:
            self._inbox.put(message)

    def _forget(self, stream: Stream, unfinished: tuple[str, ...]) -> None:
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)
        if unfinished:
            self._tell(_Abort(unfinished))

    def _deliver(self, updates: list[Update], answers: list[_Answer]) -> None:
        for reply, value, error in answers:
            if reply.done():
                continue  # who asked has gone
            if error is None:
                reply.set_result(value)
            else:
                reply.set_exception(error)
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is not None:
                stream._push(update)

    def _die(self, dead: EngineDead) -> None:
        self._bury(dead)
        if self.on_death is not None:
            self.on_death(dead)

    def _bury(self, dead: EngineDead) -> None:
        """Nothing will be answered any more: say so to everyone who waits."""
        if self._dead is not None:
            return
        self._dead = dead
        while (message := self._next_message()) is not None:
            if isinstance(message, _Ask) and not message.reply.done():
                message.reply.set_exception(dead)
        for stream in set(self._streams.values()):
            stream._fail(dead)
        self._streams.clear()

    # Below: the engine's own thread.

    def _run(self) -> None:
        try:
            while self._read_inbox():
                updates = self._engine.step()
                self._post(updates)
            self._engine.shutdown()
        except Exception as error:
            log.exception("the engine died")
            self._post_death(EngineDead(f"the engine died: {type(error).__name__}: {error}"))

    def _read_inbox(self) -> bool:
        """Obey what was asked since the step before, waiting if there is nothing else to do.

        False: the thread is to end.
        """
        message = self._inbox.get() if self._engine.idle else self._next_message()
        while message is not None:
            if isinstance(message, _Quit):
                return False
            self._obey(message)
            message = self._next_message()
        return True

    def _next_message(self) -> _Message | None:
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _obey(self, message: _Message) -> None:
        if isinstance(message, _Ask):
            try:
                self._answers.append(_Answer(message.reply, message.what(self._engine)))
            except Exception as error:  # noqa: BLE001 - a border: it goes to who asked
                self._answers.append(_Answer(message.reply, error=error))
        elif isinstance(message, _Abort):
            for request_id in message.request_ids:
                self._news.extend(self._engine.abort(request_id))
        elif isinstance(message, _AbortSequence):
            self._engine.abort_sequence(message.request_id, message.index)

    def _post(self, updates: list[Update]) -> None:
        """Hand the turn's news to the event loop, in one call."""
        if self._news:
            updates, self._news = self._news + updates, []
        answers, self._answers = self._answers, []
        if updates or answers:
            self._call_soon(self._deliver, updates, answers)

    def _post_death(self, dead: EngineDead) -> None:
        answers, self._answers = self._answers, []
        failed = [_Answer(a.reply, error=dead) for a in answers]
        self._call_soon(self._deliver, [], failed)
        self._call_soon(self._die, dead)

    def _call_soon(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _add_all(engine: Engine, requests: tuple[Request, ...]) -> None:
    """Add all, or none if one is refused."""
    added: list[str] = []
    try:
        for request in requests:
            engine.add(request)
            added.append(request.id)
    except Exception:
        for request_id in added:
            engine.abort(request_id)
        raise
