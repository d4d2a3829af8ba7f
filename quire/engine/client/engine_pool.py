"""Engine pool: engines of one model behind one client. Each request runs on one of them.

Placement decides which (quire.engine.client.placement). When an engine dies, the others continue
its streams from the delivered tokens while another is started; if there are no others, its
requests wait for that one. What is not a request goes to all engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from quire.core.scheduler_stats import SchedulerStats
from quire.core.snapshot import Snapshot
from quire.core.types import Request
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.observer import ClientObserver
from quire.engine.client.placement import Placement, Sent
from quire.engine.client.stream import RequestStream, StreamGroup
from quire.errors import EngineAway, EngineDead, EngineError, RequestError

log = logging.getLogger(__name__)

T = TypeVar("T")


class EnginePool:
    """One or more engines. All of it runs on one event loop."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        cache_tokens: int = 0,
        on_death: Callable[[EngineDead], None] | None = None,
        first_rank: int = 0,
    ) -> None:
        """cache_tokens: of one engine's KV cache. on_death: called when no engine is left."""
        assert clients, "a pool without engines"
        self.clients = tuple(clients)
        self.ranks = range(first_rank, first_rank + len(clients))
        """The rank of each engine: those of several pools of one model are distinct."""
        self._draining: set[int] = set()
        self.on_draining: Callable[[int, float | None], None] | None = None
        """Called with the arguments of each drain(): other pools should call set_draining()."""
        self._placement = Placement(len(clients), cache_tokens)
        self._on_death = on_death
        self.on_input_blocked: Callable[[bytes], None] | None = None
        """Called with each fingerprint that was blocked here: other pools should block it too."""
        self._observer: ClientObserver | None = None
        for index, client in enumerate(self.clients):
            client.on_engine_dead = self._on_engine_dead
            client.on_input_blocked = partial(self._on_input_blocked, client)
            client.on_load = partial(self._placement.report, index)
            client.on_engine_lost = partial(self._placement.clear, index)
            if len(clients) > 1:
                client.take_over = self._take_over

    def start(self) -> None:
        """Start. Called once, on the event loop that will use the pool."""
        for client in self.clients:
            client.start()

    async def stop(self) -> None:
        """Stop the transports. Open streams raise EngineDead."""
        for client in self.clients:  # nor may it keep this pool alive
            client.take_over = client.on_engine_dead = client.on_input_blocked = None
        await asyncio.gather(*(client.stop() for client in self.clients))

    def close(self) -> None:
        """Disconnect without waiting, also when the event loop is closed."""
        for client in self.clients:
            client.transport.close()

    # -- requests -------------------------------------------------------------------------------

    async def generate(
        self, requests: Iterable[Request], rank: int | None = None
    ) -> RequestStream | StreamGroup:
        """Submit requests, all or none. Returns their stream once they are accepted.

        rank: of the engine that runs all of them; others continue if it dies. None: placement
        chooses one for each request. Raises RequestError (TooLong ...), EngineDead, EngineAway.
        """
        given = tuple(requests)
        pinned = None if rank is None else self.engine_of(rank)
        if len(self.clients) == 1:
            return await self.clients[0].generate(given)
        if pinned is not None:
            return await self._submit([self._placement.begin(given, pinned)], given, moves=False)
        parts: dict[int, _Part] = {}
        for one in given:
            sent, placed = self._place(one)
            part = parts.setdefault(sent.engine, _Part([], []))
            part.sent.append(sent)
            part.requests.append(placed)
        if len(parts) == 1:
            return await self._submit(*parts.popitem()[1])
        return await self._submit_parts(parts.values(), [one.id for one in given])

    def engine_of(self, rank: int) -> int:
        """Return the number of the engine with this rank. Raises RequestError."""
        if rank not in self.ranks:
            allowed = f"in [{self.ranks[0]}, {self.ranks[-1]}]"
            message = f"data_parallel_rank must be {allowed}, got {rank!r:.40}"
            raise RequestError(message, param="data_parallel_rank")
        return rank - self.ranks[0]

    async def _submit_parts(
        self, parts: Iterable[_Part], request_ids: Sequence[str]
    ) -> StreamGroup:
        """Submit a part of the requests to each of several engines, all or none."""
        tasks = [asyncio.ensure_future(self._submit(*part)) for part in parts]
        try:
            return StreamGroup(await asyncio.gather(*tasks), request_ids)
        except BaseException:  # also when the caller was cancelled
            for task in tasks:
                task.cancel()
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(found, RequestStream):
                    found.close()
            raise

    async def _submit(
        self, sent: Sequence[Sent], requests: Sequence[Request], *, moves: bool = True
    ) -> RequestStream:
        """Submit requests that are sent to one engine. moves: to others if it is lost meanwhile."""
        tried: set[int] = set()
        while True:
            none_answers = not self.usable
            try:
                return await self.clients[sent[0].engine].generate(requests)
            except (EngineAway, EngineDead) as error:
                tried.add(sent[0].engine)  # it was lost before it had accepted them
                waited = none_answers and isinstance(error, EngineAway)
                if not moves or waited or len(tried) == len(self.clients):
                    raise
            finally:
                for one in sent:
                    self._placement.end(one)
            requests = [_without_parent(one) for one in requests]  # the KV is lost
            sent = [self._placement.place(requests, self._candidates(tried))]

    def _place(self, request: Request) -> tuple[Sent, Request]:
        """Choose an engine. Returns what is sent to it, and the request as it can take it."""
        if request.parent is not None:
            for engine in self.usable:
                if self.clients[engine].holds(request.parent):
                    return self._placement.begin([request], engine), request
            request = _without_parent(request)
        return self._placement.place([request], self._candidates()), request

    def _candidates(self, without: Container[int] = ()) -> list[int]:
        """Numbers of the engines that may get new requests, except those in `without`."""
        usable = [i for i in self.usable if i not in without]
        if usable:
            return [i for i in usable if i not in self._draining] or usable
        left = [i for i in range(len(self.clients)) if i not in without]
        return [min(left, key=lambda i: self.clients[i].restore_expected_at)]  # expected first

    @property
    def usable(self) -> list[int]:
        """Numbers of the engines that answer."""
        return [
            i
            for i, one in enumerate(self.clients)
            if one.dead_error is None and one.restart_reason is None
        ]

    # -- draining -------------------------------------------------------------------------------

    def is_draining(self, engine: int) -> bool:
        """Whether an engine gets no new requests."""
        return engine in self._draining

    def drain(self, engine: int, move_after_s: float | None) -> None:
        """As set_draining(), in all pools."""
        self.set_draining(engine, move_after_s)
        if self.on_draining is not None:
            self.on_draining(engine, move_after_s)

    def set_draining(self, engine: int, move_after_s: float | None) -> None:
        """Send an engine no new requests while another answers. None: send it requests again.

        Streams that are open after so many seconds continue on others.
        """
        if move_after_s is None:
            self._draining.discard(engine)
        else:
            self._draining.add(engine)
            asyncio.get_running_loop().call_later(move_after_s, self._move_streams, engine)

    def _move_streams(self, engine: int) -> None:
        """Continue the streams of a draining engine on others, from their delivered tokens."""
        others = [i for i in self.usable if i not in self._draining]
        if engine in self._draining and engine in self.usable and others:
            moved = self.clients[engine].move_streams(self._take_over)
            log.info("engine %d is drained: %d streams were moved", self.ranks[engine], moved)

    def _take_over(self, stream: RequestStream) -> bool:
        """Continue a stream whose engine is gone on another. False: there is none."""
        requests = stream.unfinished_requests
        if not self.usable or not requests:
            return False
        sent = self._placement.place(requests, self._candidates())
        self.clients[sent.engine].adopt(stream)
        self._placement.end(sent)
        return True

    def fail_streams(self, error: EngineError) -> None:
        """Abort all streams; each raises `error`. New streams may be opened."""
        for client in self.clients:
            client.fail_streams(error)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests; their streams get the terminal updates. Unknown ids are ignored."""
        ids = list(request_ids)
        for client in self.clients:
            await client.abort(ids)

    async def abort_named(self, names: Iterable[str], tenant: bytes | None = None) -> int:
        """Abort requests with one of these names: an id without its last -N. Returns their number.

        tenant: only requests of this tenant; None: of any. Their streams get the terminal updates.
        """
        wanted = list(names)
        clients = [self.clients[i] for i in self.usable] or self.clients
        return sum([await one.abort_named(wanted, tenant) for one in clients])

    def block_fingerprint(self, found: bytes) -> None:
        """Refuse inputs with this fingerprint, which break steps or engines as others found."""
        for client in self.clients:
            client.block_fingerprint(found)

    def _on_input_blocked(self, client: EngineClient, found: bytes) -> None:
        for one in self.clients:
            if one is not client:
                one.block_fingerprint(found)
        if self.on_input_blocked is not None:
            self.on_input_blocked(found)

    @property
    def observer(self) -> ClientObserver | None:
        """Observes the messages of all engines."""
        return self._observer

    @observer.setter
    def observer(self, observer: ClientObserver | None) -> None:
        self._observer = observer
        for client in self.clients:
            client.observer = None if observer is None else _PoolObserver(observer, self)

    def request_ids(self) -> set[str]:
        """The ids of all requests of open streams."""
        return {name for client in self.clients for name in client.request_ids()}

    # -- the engines ----------------------------------------------------------------------------

    def _on_engine_dead(self, dead: EngineDead) -> None:
        if self.dead_error is None:
            log.error("an engine is lost, %d are left: %s", len(self.usable), dead)
        elif self._on_death is not None:
            self._on_death(dead)

    @property
    def dead_error(self) -> EngineDead | None:
        """Why no engine will answer any more. None while one is alive."""
        errors = [client.dead_error for client in self.clients]
        return errors[0] if all(errors) else None

    @property
    def restart_reason(self) -> str | None:
        """Why all engines are being restarted; None while there is one."""
        reasons = [one.restart_reason for one in self.clients if one.dead_error is None]
        return reasons[0] if reasons and all(reasons) else None

    @property
    def restarts(self) -> int:
        """How many engines have replaced others."""
        return sum(client.restarts for client in self.clients)

    @property
    def last_heartbeat_at(self) -> float:
        """When the last message of the engine that has been silent for longest arrived."""
        alive = [self.clients[i] for i in self.usable] or self.clients
        return min(client.last_heartbeat_at for client in alive)

    def restart(self, reason: str) -> None:
        """Kill the engines and start others, which continue the streams."""
        for client in self.clients:
            client.restart(reason)

    # -- the engines between requests -----------------------------------------------------------

    async def call(self, kind: type[T], name: str, *args: Any) -> T:
        """Call a method of EngineRpc on every engine. Returns the first one's result.

        Raises what the first that fails raises, EngineAway.
        """
        return (await self.call_each(kind, name, *args))[0]

    async def call_each(self, kind: type[T], name: str, *args: Any) -> list[T]:
        """The same; returns the result of each engine that lives."""
        return await self._all(lambda one: one.call(kind, name, *args))

    async def stats(self) -> list[SchedulerStats]:
        """Counters of each engine's scheduler, between two steps."""
        return await self._all(lambda one: one.stats())

    async def snapshot(self, rows: int = 0, blocks: bool = False, *, engine: int = 0) -> Snapshot:
        """The state of one engine: at most so many rows, with or without the block map."""
        return await self.clients[engine].snapshot(rows, blocks)

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Empty the prefix caches. False if blocks are in use. reset_running: abort all first."""
        return all(await self._all(lambda one: one.reset_prefix_cache(reset_running=reset_running)))

    async def reset_encoder_cache(self) -> None:
        """Forget what encoders made of images, video and audio."""
        await self._all(lambda one: one.reset_encoder_cache())

    async def check(self) -> None:
        """Check the invariants of pools and caches. Raises AssertionError."""
        await self._all(lambda one: one.check())

    @property
    def is_sleeping(self) -> bool:
        """Whether an engine sleeps or is paused."""
        return bool(self.sleeping_tags)

    @property
    def sleeping_tags(self) -> frozenset[str]:
        """What sleeps in any engine: weights, kv_cache, scheduling."""
        return frozenset().union(*(client.sleeping_tags for client in self.clients))

    @property
    def is_paused(self) -> bool:
        """Whether steps are paused: new requests are accepted and wait."""
        return "scheduling" in self.sleeping_tags

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause steps, as EngineClient.sleep()."""
        await self._all(lambda one: one.sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Wake up some tags (weights, kv_cache, scheduling) or all. True if nothing sleeps then."""
        return all(await self._all(lambda one: one.wake_up(tags)))

    async def pause(self, mode: str = "abort", *, clear_cache: bool = False) -> None:
        """Pause steps until resume(). New requests wait. mode: as for sleep()."""
        await self._all(lambda one: one.pause(mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        """Run steps again after pause()."""
        await self.wake_up()

    async def start_profile(self) -> None:
        """Record traces in the engines' processes until stop_profile()."""
        await self._all(lambda one: one.start_profile())

    async def stop_profile(self) -> list[str]:
        """Write the traces. Returns their paths on the engines' machines."""
        return await self._all(lambda one: one.stop_profile())

    async def _all(self, call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """Call every engine that lives, at the same time. Raises EngineDead if none does."""
        dead = self.dead_error
        if dead is not None:
            raise dead
        alive = [client for client in self.clients if client.dead_error is None]
        return list(await asyncio.gather(*(call(client) for client in alive)))


class _Part(NamedTuple):
    """Requests of a call that one engine gets."""

    sent: list[Sent]
    requests: list[Request]


def _without_parent(request: Request) -> Request:
    return request if request.parent is None else replace(request, parent=None)


class _PoolObserver:
    """Observes one client of a pool: the requests of the others have updates too."""

    def __init__(self, observer: ClientObserver, pool: EnginePool) -> None:
        self._observer, self._pool = observer, pool
        self.on_requests_accepted = observer.on_requests_accepted
        self.on_updates = observer.on_updates
        self.on_sequence_ended = observer.on_sequence_ended

    def retain_requests(self, request_ids: Container[str]) -> None:
        self._observer.retain_requests(self._pool.request_ids())
