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
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import msgspec

from quire.core.quarantine import Quarantine
from quire.core.snapshot import Snapshot
from quire.core.stats import SchedulerStats
from quire.core.timing import Timing
from quire.core.types import Request, Update
from quire.engine.link import Away
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
    fingerprint,
)
from quire.engine.stream import Stream
from quire.engine.told import DEATHS
from quire.errors import EngineAway, EngineCrashed, EngineDead, EngineError, Quarantined

log = logging.getLogger(__name__)

WAIT_S = 30.0
MOST_WAITING = 1024
"""Requests that wait here for an engine that is being restarted."""
COMFORT_S = 2.0
"""While it is, streams say that they live this often."""

T = TypeVar("T")


class Transport(Protocol):
    """Carries messages to an engine and back."""

    def start(
        self,
        deliver: Callable[[FromEngine], None],
        die: Callable[[EngineDead], None],
        away: Callable[[Away], None],
        back: Callable[[], None],
    ) -> None:
        """Begin, on the event loop that will use it: all four are called there.

        away: the engine is gone, and what was sent to it; back: there is another. die: for good.
        """
        ...

    def send(self, message: ToEngine) -> None: ...

    def restart(self, reason: str) -> None:
        """Have the engine ended, whatever it does, and another started."""
        ...

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

    def only(self, request_ids: Container[str]) -> None:
        """No update follows of any but these: their engine has died."""
        ...


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
        self.quarantine = Quarantine()
        self.on_condemned: Callable[[bytes], None] | None = None
        """Told of the fingerprints that come into quarantine by what happened here: who speaks to
        the same engine is to put them into its own, by condemn()."""
        self.away: str | None = None
        """Why the engine is being restarted; None while there is one."""
        self.restarts = 0
        """How many engines have taken over here."""
        self.wait_s = WAIT_S
        """How long a new request waits for an engine that is being restarted."""
        self._back: asyncio.Future[None] | None = None  # while it is away
        self._expected_at = 0.0  # when another should be there
        self._waiting = 0  # requests that wait for it
        self._before: dict[tuple[str, int], Timing] = {}  # spent in engines that are gone
        self._readded: dict[int, Stream] = {}  # by the number of the Add
        self._held: set[str] = set()  # requests whose KV this engine holds for others
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._opening: dict[int, Stream] = {}  # by the number of their Add
        self._numbers = itertools.count()
        self._asleep: frozenset[str] = frozenset()
        self._dead: EngineDead | None = None

    def start(self) -> None:
        """Begin. Called once, on the event loop that will use the client."""
        self.beat = time.monotonic()
        self.transport.start(self._deliver, self._die, self._lose, self._resume)

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

        Returns when the engine has accepted them. Raises RequestError (TooLong ...), EngineDead,
        EngineAway.
        """
        all_of_them = tuple(requests)
        self._check_quarantine(all_of_them)
        if self.away is not None:
            await self._wait_for_engine(len(all_of_them))
            self._check_quarantine(all_of_them)  # one of the kind may be what it died of
        travelling = [carried(self._orphaned(one)) for one in all_of_them]
        stream = Stream(self, all_of_them)
        for request_id in stream.request_ids:
            assert request_id not in self._streams, f"two requests with the id {request_id}"
            self._streams[request_id] = stream
        self._held.update(one.id for one in all_of_them if one.hold)
        try:
            await self._ask(lambda number: self._adding(number, stream, travelling))
        except BaseException:
            stream.close()  # also when the caller gave up while we waited
            raise
        return stream

    def _check_quarantine(self, requests: Iterable[Request]) -> None:
        if not len(self.quarantine):
            return
        for one in requests:
            left = self.quarantine.left_s(fingerprint(one))
            if left is not None:
                raise _quarantined(left)

    def condemn(self, found: bytes) -> None:
        """Somebody else's request with this fingerprint has broken a step, or engines."""
        self.quarantine.put(found)
        if self.away is not None:
            self._end_alike(found, 0)

    def _condemn(self, request: Request) -> bytes:
        """It has broken a step, or engines. Its fingerprint."""
        found = fingerprint(request)
        self.quarantine.put(found)
        if self.on_condemned is not None:
            self.on_condemned(found)
        return found

    def _end_alike(self, condemned: bytes, said: int) -> None:
        """What killed an engine had said so many tokens: others with its input that have not come
        further would kill the next.
        """
        for stream in self._all_streams():
            if any(fingerprint(one) == condemned for one in stream._not_beyond(said)):
                left = self.quarantine.left_s(condemned)
                self._drop(stream, _quarantined(left or 0.0))

    def _adding(self, number: int, stream: Stream, travelling: list[Carried]) -> ToEngine:
        self._opening[number] = stream
        stream._number = number
        return Add(number, travelling)

    def _orphaned(self, request: Request) -> Request:
        """Without its parent, if that was held by an engine that is gone."""
        if request.parent is None or not self.restarts or request.parent in self._held:
            return request
        return replace(request, parent=None)

    async def _wait_for_engine(self, requests: int) -> None:
        """Until another engine is there. Raises EngineAway: it takes long, or many wait already."""
        if self._waiting + requests > MOST_WAITING:
            raise self._is_away(f"and {self._waiting} requests wait for it already")
        self._waiting += requests
        try:
            async with asyncio.timeout(self.wait_s):
                while self._back is not None:
                    await asyncio.shield(self._back)
        except TimeoutError:
            raise self._is_away(f"which takes longer than {self.wait_s:g} s") from None
        finally:
            self._waiting -= requests

    def _is_away(self, more: str) -> EngineAway:
        left = max(self._expected_at - time.monotonic(), 1.0)
        return EngineAway(f"the engine is being restarted, {more}: try again", retry_after_s=left)

    def end_streams(self, error: EngineError) -> None:
        """Abort everything that is open; each stream raises `error`. New ones may be opened."""
        for stream in self._all_streams():
            self._drop(stream, error)
        if self._back is not None and self._waiting:
            self._back.set_exception(error)
            self._back = asyncio.get_running_loop().create_future()

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now; their streams get the terminal updates. Unknown ids are ignored."""
        ids = list(request_ids)
        self._held.difference_update(ids)
        if self.away is None:
            self._tell(Abort(ids))
            return
        found = dict.fromkeys(self._streams[one] for one in ids if one in self._streams)
        live = [place for stream in found for place in stream._live if place[0] in ids]
        self._hand_out([Update(*place, (), "abort") for place in live])

    async def abort_named(self, names: Iterable[str], tenant: bytes | None = None) -> int:
        """End requests whose id without its last -N is one of these names; None: anybody's.

        Their streams get the terminal updates. Returns how many requests there were. While the
        engine is away those of this client are found; EngineAway if there are none.
        """
        wanted = frozenset(names)
        if self.away is None or self._dead is not None:
            return await self._call(int, "abort_named", list(wanted), tenant)
        live = {one.id: one for stream in self._all_streams() for one in stream._requests}
        found = [
            name
            for name, one in live.items()
            if name.rpartition("-")[0] in wanted and tenant in (None, one.tenant)
        ]
        if not found:
            raise self._is_away(f"and cannot be asked: {self.away}")
        await self.abort(found)
        return len(found)

    # -- when it dies -----------------------------------------------------------------------------

    def restart(self, reason: str) -> None:
        """Have the engine ended, whatever it does, and another started: streams go on there."""
        log.error("the engine is to be restarted: %s", reason)
        self.transport.restart(reason)

    def _lose(self, loss: Away) -> None:
        """The engine is gone, and another will come."""
        self.away = loss.why
        self._expected_at = time.monotonic() + loss.expected_s
        if self._back is None:
            self._back = asyncio.get_running_loop().create_future()
            self._comfort()
        for number in self._asked.keys() - self._opening.keys():
            reply = self._asked[number]
            if not reply.done():
                reply.set_exception(self._is_away(f"and cannot be asked: {loss.why}"))
        self._held.clear()
        self._readded.clear()
        aboard = None if loss.aboard is None else frozenset(loss.aboard)
        condemned = []
        for stream in self._all_streams():
            culprit = stream._was_aboard(aboard)
            if culprit is not None:
                condemned.append(self._give_up(stream, culprit))
                continue
            for place, told in stream._live.items():
                self._before[place] = told.leave(stream._accepted_at, self.beat)
        for found, said in condemned:
            self._end_alike(found, said)
        self._opening = {n: one for n, one in self._opening.items() if not one.closed}
        self._clear_books()

    def _clear_books(self) -> None:
        """Of what is here no more, and no update will tell the end of."""
        if self.observer is not None:
            self.observer.only(self._streams.keys())

    def _give_up(self, stream: Stream, culprit: Request) -> tuple[bytes, int]:
        """End it. The culprit's fingerprint, and how many tokens it had said."""
        said = stream._said(culprit)
        deaths = stream._deaths[culprit.id]
        log.error("request %s was aboard %d engines that died: it ends", culprit.id, deaths)
        often = "twice" if deaths == DEATHS else f"{deaths} times"
        message = f"the engine died {often} with this request aboard: it is not tried again"
        self._drop(stream, EngineCrashed(message))
        return self._condemn(culprit), said

    def _drop(self, stream: Stream, error: Exception) -> None:
        """End a stream with this error, and its requests in the engine."""
        unfinished = stream.unfinished
        number = stream._number
        stream._fail(error)
        if number is not None:
            self._opening.pop(number, None)
            reply = self._asked.get(number)
            if reply is not None and not reply.done():
                reply.set_exception(error)
        self._forget(stream, unfinished)

    def _resume(self) -> None:
        """Another engine is there: it gets all that has not ended."""
        self.restarts += 1
        self.away = None
        self.beat = time.monotonic()
        if self._asleep:
            level = int("kv_cache" in self._asleep)
            self._tell(Call(next(self._numbers), "sleep", [level, "keep", False]))
        for stream in sorted(self._all_streams(), key=lambda one: one._most_deaths):
            self._add_again(stream)  # who is suspected most is tried last
        if self._back is not None:
            self._back.set_result(None)
            self._back = None

    def _add_again(self, stream: Stream) -> None:
        """What nobody has accepted yet goes all together; what was accepted, each for itself."""
        requests = stream._again()
        self._held.update(one.id for one in requests if one.hold)
        if stream._number is not None:
            self._tell(Add(stream._number, [carried(one) for one in requests]))
            return
        for one in requests:
            number = next(self._numbers)
            self._readded[number] = stream
            self._tell(Add(number, [carried(one)]))

    def _comfort(self) -> None:
        """Let streams say that they live, every now and then while the engine is away."""
        if self._back is not None and self._dead is None:
            for stream in self._all_streams():
                stream._nudge()
            asyncio.get_running_loop().call_later(COMFORT_S, self._comfort)

    def _all_streams(self) -> list[Stream]:
        """In the order of their requests."""
        return list(dict.fromkeys(self._streams.values()))

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
        if self.away is not None and self._dead is None:
            raise self._is_away(f"and cannot be asked: {self.away}")
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
        if self._dead is None and self.away is None:
            self.transport.send(message)

    def _forget(self, stream: Stream, unfinished: tuple[str, ...]) -> None:
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)
        if self._before:
            for one in stream._requests:
                for index in range(one.n):
                    self._before.pop((one.id, index), None)
        if not unfinished:
            return
        self._tell(Abort(list(unfinished)))
        if self.away is not None:
            if stream._number is not None:
                self._opening.pop(stream._number, None)  # its Add went down with the engine
            self._clear_books()

    def _deliver(self, message: FromEngine) -> None:
        self.beat = time.monotonic()
        if isinstance(message, News):
            for answer in message.answers:
                self._settle(answer)
            updates = message.updates
            self._hand_out([self._in_full(u) for u in updates] if self._before else updates)
        elif isinstance(message, Beat):
            self._asleep = frozenset(message.asleep)
        elif isinstance(message, Dead):
            self._die(EngineDead(message.why))

    def _hand_out(self, updates: list[Update]) -> None:
        if self.observer is not None and updates:
            self.observer.news(updates)
        streams = self._streams
        for update in updates:
            stream = streams.get(update.request_id)
            if stream is not None:
                stream._push(update)

    def _in_full(self, update: Update) -> Update:
        """With the time that its sequence has spent in engines that are gone."""
        before = self._before.get((update.request_id, update.index))
        if before is None or update.timing is None:
            return update
        return update._replace(timing=before.then(update.timing))

    def _settle(self, answer: Answer) -> None:
        stream = self._readded.pop(answer.number, None)
        if stream is not None and answer.fault is not None:
            self._drop(stream, error_of(answer.fault))
        opened = self._opening.pop(answer.number, None)
        if opened is not None:
            opened._number = None
            opened._accepted_at = time.monotonic()
            if answer.fault is None and self.observer is not None:
                self.observer.opened(opened._requests)
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
        if self._back is not None:
            self._back.set_result(None)
            self._back = None
        for reply in self._asked.values():
            if not reply.done():
                reply.set_exception(dead)
        for stream in set(self._streams.values()):
            stream._fail(dead)
        self._streams.clear()


def _quarantined(left_s: float) -> Quarantined:
    return Quarantined(
        "a request with the same input and parameters has broken a step of the engine, "
        f"or the engine itself: it is not tried again for {left_s:.0f} s"
    )
