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
from typing import Any, TypeVar

from quire.core.scheduler_stats import SchedulerStats
from quire.core.snapshot import Snapshot
from quire.core.types import Request
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.observer import ClientObserver
from quire.engine.client.placement import Placement, Sent
from quire.engine.client.stream import RequestStream
from quire.errors import EngineAway, EngineDead, EngineError

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
    ) -> None:
        """cache_tokens: of one engine's KV cache. on_death: called when no engine is left."""
        assert clients, "a pool without engines"
        self.clients = tuple(clients)
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
        for client in self.clients:
            client.take_over = None
        await asyncio.gather(*(client.stop() for client in self.clients))

    # -- requests -------------------------------------------------------------------------------

    async def generate(self, requests: Iterable[Request]) -> RequestStream:
        """Submit requests to one engine, all or none. Returns the stream once they are accepted.

        Raises RequestError (TooLong ...), EngineDead, EngineAway.
        """
        given = tuple(requests)
        if len(self.clients) == 1:
            return await self.clients[0].generate(given)
        tried: set[int] = set()
        while True:
            none_answers = not self.usable
            sent, placed = self._place(given, tried)
            try:
                return await self.clients[sent.engine].generate(placed)
            except (EngineAway, EngineDead) as error:
                tried.add(sent.engine)  # it was lost before it had accepted them
                waited = none_answers and isinstance(error, EngineAway)
                if waited or len(tried) == len(self.clients):
                    raise
            finally:
                self._placement.end(sent)

    def _place(
        self, requests: tuple[Request, ...], tried: Container[int]
    ) -> tuple[Sent, tuple[Request, ...]]:
        """Choose an engine. Returns what is sent to it, and the requests as it can take them."""
        usable = [i for i in self.usable if i not in tried]
        if not usable:  # wait for the engine that is expected first
            left = [i for i, one in enumerate(self.clients) if i not in tried]
            usable = [min(left, key=lambda i: self.clients[i].restore_expected_at)]
        for one in requests:
            if one.parent is not None:
                at = next((i for i in usable if self.clients[i].holds(one.parent)), None)
                if at is not None:
                    return self._placement.begin(requests, at), requests
        requests = tuple(
            one if one.parent is None else replace(one, parent=None) for one in requests
        )
        return self._placement.place(requests, usable), requests

    @property
    def usable(self) -> list[int]:
        """Numbers of the engines that answer."""
        return [
            i
            for i, one in enumerate(self.clients)
            if one.dead_error is None and one.restart_reason is None
        ]

    def _take_over(self, stream: RequestStream) -> bool:
        """Continue a stream whose engine is gone on another. False: there is none."""
        usable = self.usable
        requests = stream.unfinished_requests
        if not usable or not requests:
            return False
        sent = self._placement.place(requests, usable)
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


class _PoolObserver:
    """Observes one client of a pool: the requests of the others have updates too."""

    def __init__(self, observer: ClientObserver, pool: EnginePool) -> None:
        self._observer, self._pool = observer, pool
        self.on_requests_accepted = observer.on_requests_accepted
        self.on_updates = observer.on_updates
        self.on_sequence_ended = observer.on_sequence_ended

    def retain_requests(self, request_ids: Container[str]) -> None:
        self._observer.retain_requests(self._pool.request_ids())
