"""Async client of the engine: streams of updates, calls between steps, and recovery after a crash.

Sends messages through a transport: to a thread of this process
(quire.engine.client.thread_transport) or over a socket to the engine's process
(quire.engine.client.zmq_transport). A `RequestStream` owns its requests; closing it aborts them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from quire.core.admission.request_blocklist import RequestBlocklist
from quire.core.media.item_tensors import without_tensors
from quire.core.scheduler_stats import EngineLoad, SchedulerStats
from quire.core.snapshot import Snapshot
from quire.core.types import Request, Update
from quire.engine.client.delivered_tokens import MAX_CRASHES_ALONE, MovedSequences, PriorTimings
from quire.engine.client.observer import ClientObserver
from quire.engine.client.restart_wait import RestartWait
from quire.engine.client.stream import RequestStream
from quire.engine.client.transport import Transport
from quire.engine.messages import (
    AbortRequests,
    AbortSequence,
    AddRequests,
    CallReply,
    EngineDeadMessage,
    HeartbeatMessage,
    MessageFromEngine,
    MessageToEngine,
    OutputBatch,
    UtilityCall,
    WireRequest,
    error_from_wire,
    fingerprint,
    request_to_wire,
)
from quire.engine.supervise.process_pipe import EngineUnavailable
from quire.errors import (
    EngineCrashed,
    EngineDead,
    EngineError,
    Quarantined,
)

log = logging.getLogger(__name__)

RESTART_WAIT_S = 30.0
KEEPALIVE_S = 2.0
"""Interval at which streams yield an empty list meanwhile."""

TakeOver = Callable[["RequestStream"], bool]

T = TypeVar("T")


class EngineClient:
    """Client of one engine. All of it runs on one event loop."""

    def __init__(
        self, transport: Transport, *, on_death: Callable[[EngineDead], None] | None = None
    ) -> None:
        self.on_engine_dead = on_death
        self.transport = transport
        self.last_heartbeat_at = time.monotonic()
        """When the last message of the engine arrived."""
        self.observer: ClientObserver | None = None
        self._streams: dict[str, RequestStream] = {}
        self.blocklist = RequestBlocklist()
        self.on_input_blocked: Callable[[bytes], None] | None = None
        """Called with each fingerprint that was blocked here: other clients of the engine should
        block it too, with block_fingerprint()."""
        self.restarts = 0
        """How many engines have replaced the first."""
        self.on_load: Callable[[EngineLoad], None] = lambda load: None
        """Called with the load of the engine after each of its steps."""
        self.on_engine_lost: Callable[[], None] = lambda: None
        """Called when the engine is gone, before take_over."""
        self.take_over: TakeOver | None = None
        """Called with each stream whose engine is gone. True: another client continues it, by
        adopt(). None: its requests wait here for the next engine."""
        self.restart_wait_s = RESTART_WAIT_S
        """How long a new request waits for an engine that is being restarted."""
        self._restart = RestartWait()
        self._prior_timings = PriorTimings()
        self._resubmitted: dict[int, RequestStream] = {}  # by the call id of AddRequests
        self._held_requests: set[str] = set()  # this engine keeps their KV for other requests
        self._moved = MovedSequences()
        self._pending_calls: dict[int, asyncio.Future[Any]] = {}
        self._opening_streams: dict[int, RequestStream] = {}  # by the call id of AddRequests
        self._call_ids = itertools.count()
        self._sleeping_tags: frozenset[str] = frozenset()
        self._dead_error: EngineDead | None = None

    def start(self) -> None:
        """Start. Called once, on the event loop that will use the client."""
        self.last_heartbeat_at = time.monotonic()
        self.transport.start(
            self._deliver,
            self._on_engine_dead,
            self._on_engine_unavailable,
            self._on_engine_restored,
        )

    async def stop(self) -> None:
        """Stop the transport. Open streams raise EngineDead."""
        await self.transport.stop()
        self._fail_all(EngineDead("the engine was shut down"))

    @property
    def dead_error(self) -> EngineDead | None:
        """Why the engine will not answer any more. None while it is alive."""
        return self._dead_error

    # -- requests -----------------------------------------------------------------------------

    async def generate(self, requests: Iterable[Request]) -> RequestStream:
        """Submit requests, all or none. Returns the stream of their updates once they are accepted.

        Raises RequestError (TooLong ...), EngineDead, EngineAway.
        """
        all_of_them = tuple(requests)
        self._check_blocklist(all_of_them)
        if self.restart_reason is not None:
            await self._restart.wait(len(all_of_them), self.restart_wait_s)
            self._check_blocklist(all_of_them)  # one of them may have killed the engine
        travelling = [request_to_wire(self._without_repetition(one)) for one in all_of_them]
        stream = RequestStream(self, all_of_them)
        for request_id in stream.request_ids:
            assert request_id not in self._streams, f"two requests with the id {request_id}"
            self._streams[request_id] = stream
        self._held_requests.update(one.id for one in all_of_them if one.hold)
        try:
            await self._call_and_wait(lambda number: self._make_add(number, stream, travelling))
        except BaseException:
            stream.close()  # also when the caller was cancelled meanwhile
            raise
        return stream

    def _check_blocklist(self, requests: Iterable[Request]) -> None:
        if not len(self.blocklist):
            return
        for one in requests:
            left = self.blocklist.seconds_left(fingerprint(one))
            if left is not None:
                raise _input_blocked_error(left)

    def block_fingerprint(self, found: bytes) -> None:
        """Refuse inputs with this fingerprint, which break steps or engines as others found."""
        self.blocklist.add(found)
        if self.restart_reason is not None:
            self._fail_same_input(found, 0)

    def block_input(self, request: Request) -> bytes:
        """Refuse the input of a request that broke a step or engines. Returns its fingerprint."""
        found = fingerprint(request)
        self.blocklist.add(found)
        if self.on_input_blocked is not None:
            self.on_input_blocked(found)
        return found

    def _fail_same_input(self, blocked: bytes, delivered: int) -> None:
        """Fail requests with the same input as one that killed an engine after so many tokens.

        Only those with as many tokens or fewer: they would kill the next engine.
        """
        for stream in self._all_streams():
            same = stream._requests_delivered_at_most(delivered)
            if any(fingerprint(one) == blocked for one in same):
                left = self.blocklist.seconds_left(blocked)
                self._fail_stream(stream, _input_blocked_error(left or 0.0))

    def _make_add(
        self, number: int, stream: RequestStream, travelling: list[WireRequest]
    ) -> MessageToEngine:
        self._opening_streams[number] = stream
        stream._add_call_id = number
        return AddRequests(number, travelling)

    def _without_repetition(self, request: Request) -> Request:
        """The request without tensors that the engine has of its parent, or without a parent that
        an earlier engine held."""
        if request.parent is None:
            return request
        if not self.restarts or request.parent in self._held_requests:
            return without_tensors(request)
        return replace(request, parent=None)

    def fail_streams(self, error: EngineError) -> None:
        """Abort all streams; each raises `error`. New streams may be opened."""
        for stream in self._all_streams():
            self._fail_stream(stream, error)
        self._restart.fail(error)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests; their streams get the terminal updates. Unknown ids are ignored."""
        ids = list(request_ids)
        self._held_requests.difference_update(ids)
        if self.restart_reason is None:
            self._send(AbortRequests(ids))
            return
        found = dict.fromkeys(self._streams[one] for one in ids if one in self._streams)
        live = [place for stream in found for place in stream._unfinished if place[0] in ids]
        self._dispatch([Update(*place, (), "abort") for place in live])

    async def abort_named(self, names: Iterable[str], tenant: bytes | None = None) -> int:
        """Abort requests with one of these names: an id without its last -N. Returns their number.

        tenant: only requests of this tenant; None: of any. Their streams get the terminal updates.
        While there is no engine, only requests of this client are found. Raises EngineAway if
        there are none.
        """
        wanted = frozenset(names)
        if self.restart_reason is None or self._dead_error is not None:
            return await self.call(int, "abort_named", list(wanted), tenant)
        live = {one.id: one for stream in self._all_streams() for one in stream._requests}
        found = [
            name
            for name, one in live.items()
            if name.rpartition("-")[0] in wanted and tenant in (None, one.tenant)
        ]
        if not found:
            raise self._restart.error(f"and cannot be called: {self.restart_reason}")
        await self.abort(found)
        return len(found)

    # -- when the engine dies -------------------------------------------------------------------

    def restart(self, reason: str) -> None:
        """Kill the engine and start another, which continues the streams."""
        log.error("restarting the engine: %s", reason)
        self.transport.restart(reason)

    def _on_engine_unavailable(self, loss: EngineUnavailable) -> None:
        """The engine is gone; another is being started."""
        if self._restart.begin(loss.reason, loss.expected_restart_s):
            self._send_keepalives()
        for number in self._pending_calls.keys() - self._opening_streams.keys():
            reply = self._pending_calls[number]
            if not reply.done():
                reply.set_exception(self._restart.error(f"and cannot be called: {loss.reason}"))
        self._held_requests.clear()
        self._resubmitted.clear()
        self._moved.clear()
        running = None if loss.running_ids is None else frozenset(loss.running_ids)
        blocked = []
        for stream in self._all_streams():
            culprit = stream._record_crash(running)
            if culprit is not None:
                blocked.append(self._fail_culprit(stream, culprit))
                continue
            stream._close_timings(self.last_heartbeat_at)
            self._prior_timings.add(stream._unfinished)
        for found, count in blocked:
            self._fail_same_input(found, count)
        self.on_engine_lost()
        if self.take_over is not None:
            self._hand_over_streams(self.take_over)
        self._opening_streams = {
            n: one for n, one in self._opening_streams.items() if not one.closed
        }
        self._prune_observer()

    def request_ids(self) -> Iterable[str]:
        """The ids of all requests of open streams."""
        return self._streams.keys()

    def holds(self, request_id: str) -> bool:
        """Whether the engine keeps the KV of this request for others."""
        return request_id in self._held_requests

    @property
    def restart_reason(self) -> str | None:
        """Why the engine is being restarted; None while there is one."""
        return self._restart.reason

    @property
    def restore_expected_at(self) -> float:
        """When another engine should be ready, by time.monotonic(); 0: there is one."""
        return self._restart.expected_at

    def _hand_over_streams(self, take_over: TakeOver) -> None:
        """Move streams to other clients. Requests that are not accepted yet fail: EngineAway."""
        for stream in sorted(self._all_streams(), key=lambda one: one._max_crash_count):
            if stream._add_call_id is not None:
                self._fail_stream(stream, self._restart.error("and has not read the request"))
            elif take_over(stream):
                self._forget(stream)

    def move_streams(self, take_over: TakeOver) -> int:
        """Move accepted streams to other clients while the engine lives. Returns their number."""
        moved = 0
        for stream in self._all_streams():
            unfinished = stream.unfinished_ids
            if stream._add_call_id is not None:
                continue
            stream._close_timings(time.monotonic())
            if take_over(stream):
                self._moved.add(stream._unfinished)
                self._forget(stream)
                self._send(AbortRequests(list(unfinished)))
                moved += 1
        return moved

    def adopt(self, stream: RequestStream) -> None:
        """Continue a stream of another client, whose engine is gone or drained."""
        for request_id in stream.request_ids:
            self._streams[request_id] = stream
        stream._owner = self
        self._prior_timings.add(stream._unfinished)
        self._resubmit(stream)

    def _prune_observer(self) -> None:
        """Remove requests that will get no last update from the observer."""
        if self.observer is not None:
            self.observer.retain_requests(self._streams.keys())

    def _fail_culprit(self, stream: RequestStream, culprit: Request) -> tuple[bytes, int]:
        """End its stream. Returns its fingerprint, and how many tokens it had delivered."""
        delivered = stream._delivered_count(culprit)
        deaths = stream._crash_counts[culprit.id]
        log.error("request %s ends: %d engines died while they ran it", culprit.id, deaths)
        often = "twice" if deaths == MAX_CRASHES_ALONE else f"{deaths} times"
        message = f"the engine died {often} while it ran this request: it is not tried again"
        self._fail_stream(stream, EngineCrashed(message))
        return self.block_input(culprit), delivered

    def _fail_stream(self, stream: RequestStream, error: Exception) -> None:
        """End a stream with this error, and abort its requests."""
        unfinished = stream.unfinished_ids
        number = stream._add_call_id
        stream._fail(error)
        if number is not None:
            self._opening_streams.pop(number, None)
            reply = self._pending_calls.get(number)
            if reply is not None and not reply.done():
                reply.set_exception(error)
        self.remove_stream(stream, unfinished)

    def _on_engine_restored(self) -> None:
        """Another engine is ready: submit all requests that have not ended."""
        self.restarts += 1
        self._restart.reason = None
        self.last_heartbeat_at = time.monotonic()
        if self._sleeping_tags:
            level = int("kv_cache" in self._sleeping_tags)
            self._send(UtilityCall(next(self._call_ids), "sleep", [level, "keep", False]))
        for stream in sorted(self._all_streams(), key=lambda one: one._max_crash_count):
            self._resubmit(stream)  # the most suspect last
        self._restart.end()

    def _resubmit(self, stream: RequestStream) -> None:
        """Submit its unfinished requests, together if no engine has accepted them yet."""
        requests = stream._requests_to_resume()
        self._held_requests.update(one.id for one in requests if one.hold)
        if stream._add_call_id is not None:
            self._send(AddRequests(stream._add_call_id, [request_to_wire(one) for one in requests]))
            return
        for one in requests:
            number = next(self._call_ids)
            self._resubmitted[number] = stream
            self._send(AddRequests(number, [request_to_wire(one)]))

    def _send_keepalives(self) -> None:
        """Wake all streams every KEEPALIVE_S while there is no engine."""
        if self._restart.is_pending and self._dead_error is None:
            for stream in self._all_streams():
                stream._send_keepalive()
            asyncio.get_running_loop().call_later(KEEPALIVE_S, self._send_keepalives)

    def _all_streams(self) -> list[RequestStream]:
        """All streams, in the order of their requests."""
        return list(dict.fromkeys(self._streams.values()))

    # -- the engine between requests ------------------------------------------------------------

    async def stats(self) -> SchedulerStats:
        """Counters of the scheduler, between two steps."""
        return await self.call(SchedulerStats, "stats")

    async def snapshot(self, rows: int = 0, blocks: bool = False) -> Snapshot:
        """The state of the engine: at most so many rows, with or without the block map."""
        return await self.call(Snapshot, "snapshot", rows, blocks)

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Empty the prefix cache. False if blocks are in use. reset_running: abort all first."""
        return await self.call(bool, "reset_prefix_cache", reset_running)

    async def reset_encoder_cache(self) -> None:
        """Forget what encoders made of images, video and audio."""
        await self.call(type(None), "reset_encoder_cache")

    async def check(self) -> None:
        """Check the invariants of pool and cache. Raises AssertionError."""
        await self.call(type(None), "check")

    @property
    def sleeping_tags(self) -> frozenset[str]:
        """What sleeps: any of weights, kv_cache, scheduling."""
        return self._sleeping_tags

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause steps. Level 1 also frees the KV cache; requests are refused until wake_up().

        mode, for running requests: "abort" ends them, "wait" waits for their end, "keep" (level 0)
        continues them after wake_up().
        """
        await self._enter_sleep(level, mode, clear_cache=False)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Wake up some tags (weights, kv_cache, scheduling) or all. True if nothing sleeps then."""
        left = await self.call(list[str], "wake_up", None if tags is None else list(tags))
        self._sleeping_tags = frozenset(left)
        return not left

    async def pause(self, mode: str = "abort", *, clear_cache: bool = False) -> None:
        """Pause steps until wake_up(). New requests wait. mode: as for sleep()."""
        await self._enter_sleep(0, mode, clear_cache=clear_cache)

    async def start_profile(self) -> None:
        """Record a trace in the engine's process until stop_profile()."""
        await self.call(type(None), "start_profile")

    async def stop_profile(self) -> str:
        """Write the trace. Returns its path on the engine's machine."""
        return await self.call(str, "stop_profile")

    async def _enter_sleep(self, level: int, mode: str, *, clear_cache: bool) -> None:
        left = await self.call(list[str], "sleep", level, mode, clear_cache)
        self._sleeping_tags = frozenset(left)

    # -- messages to and from the transport --------------------------------------------------------

    async def call(self, kind: type[T], name: str, *args: Any) -> T:
        """Call a method of EngineRpc by name, between steps. Raises what it raises, EngineAway."""
        if self.restart_reason is not None and self._dead_error is None:
            raise self._restart.error(f"and cannot be called: {self.restart_reason}")
        value = await self._call_and_wait(lambda number: UtilityCall(number, name, list(args)))
        return msgspec.convert(value, kind, from_attributes=True)

    async def _call_and_wait(self, message: Callable[[int], MessageToEngine]) -> Any:
        if self._dead_error is not None:
            raise self._dead_error
        number = next(self._call_ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending_calls[number] = reply
        try:
            self.transport.send(message(number))
            return await reply
        finally:
            self._pending_calls.pop(number, None)

    def end_sequence(self, request_id: str, index: int) -> None:
        self._send(AbortSequence(request_id, index))
        if self.observer is not None:
            self.observer.on_sequence_ended(request_id, index)

    def _send(self, message: MessageToEngine) -> None:
        if self._dead_error is None and self.restart_reason is None:
            self.transport.send(message)

    def _forget(self, stream: RequestStream) -> None:
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)
        self._prior_timings.remove(stream._requests)

    def remove_stream(self, stream: RequestStream, unfinished: tuple[str, ...]) -> None:
        self._forget(stream)
        if not unfinished:
            return
        self._send(AbortRequests(list(unfinished)))
        if self.restart_reason is not None:
            if stream._add_call_id is not None:
                self._opening_streams.pop(stream._add_call_id, None)  # lost with the engine
            self._prune_observer()

    def _deliver(self, message: MessageFromEngine) -> None:
        self.last_heartbeat_at = time.monotonic()
        if isinstance(message, OutputBatch):
            for answer in message.replies:
                self._resolve_reply(answer)
            self.on_load(message.load)
            self._dispatch(self._prior_timings.apply(self._moved.drop(message.updates)))
        elif isinstance(message, HeartbeatMessage):
            self._sleeping_tags = frozenset(message.sleeping_tags)
        elif isinstance(message, EngineDeadMessage):
            self._on_engine_dead(EngineDead(message.reason))

    def _dispatch(self, updates: list[Update]) -> None:
        if self.observer is not None and updates:
            self.observer.on_updates(updates)
        streams = self._streams
        for update in updates:
            stream = streams.get(update.request_id)
            if stream is not None:
                stream._push(update)

    def _resolve_reply(self, answer: CallReply) -> None:
        stream = self._resubmitted.pop(answer.call_id, None)
        if stream is not None and stream._owner is self and answer.error is not None:
            self._fail_stream(stream, error_from_wire(answer.error))
        opened = self._opening_streams.pop(answer.call_id, None)
        if opened is not None:
            opened._add_call_id = None
            opened._accepted_at = time.monotonic()
            if answer.error is None and self.observer is not None:
                self.observer.on_requests_accepted(opened._requests)
        reply = self._pending_calls.get(answer.call_id)
        if reply is None or reply.done():
            return  # the caller was cancelled
        if answer.error is None:
            reply.set_result(answer.result)
        else:
            reply.set_exception(error_from_wire(answer.error))

    def _on_engine_dead(self, dead: EngineDead) -> None:
        if self._dead_error is not None:
            return
        if self.take_over is not None:
            self._restart.reason = self.restart_reason or str(dead)  # this one takes none of them
            self.on_engine_lost()
            self._hand_over_streams(self.take_over)
        self._fail_all(dead)
        if self.on_engine_dead is not None:
            self.on_engine_dead(dead)

    def _fail_all(self, dead: EngineDead) -> None:
        """Fail all streams and calls: nothing will be answered any more."""
        if self._dead_error is not None:
            return
        self._dead_error = dead
        self._restart.end()
        for reply in self._pending_calls.values():
            if not reply.done():
                reply.set_exception(dead)
        for stream in set(self._streams.values()):
            stream._fail(dead)
        self._streams.clear()


def _input_blocked_error(left_s: float) -> Quarantined:
    return Quarantined(
        "a request with the same input and parameters broke a step of the engine, "
        f"or the engine itself: it is not tried again for {left_s:.0f} s"
    )
