"""Engine RPC: handles the messages of clients (quire.engine.messages), without socket or thread.

The owner of the socket calls handle() for each message and run_step() for each step, and sends what
they return. A client owns the requests it added. Each step makes one OutputBatch per client that
has outputs. No message of a client can harm another's requests, or end the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from quire.core.media.item_tensors import check_tensors
from quire.core.params import RequestOutputKind
from quire.core.scheduler_stats import SchedulerStats
from quire.core.types import Request, Update
from quire.engine.coalesce_updates import coalesce
from quire.engine.core import sleep_mode
from quire.engine.core.adapter_calls import AdapterCalls
from quire.engine.core.engine_core import EngineCore
from quire.engine.core.profiler import TorchProfile
from quire.engine.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    AbortSequence,
    AdapterLoad,
    AddRequests,
    CallReply,
    EngineDeadMessage,
    EngineReady,
    HeartbeatMessage,
    Hello,
    MessageFromEngine,
    MessageToEngine,
    OutputBatch,
    UtilityCall,
    error_to_wire,
    request_from_wire,
)
from quire.engine.startup.text_setup import ParamCheck
from quire.errors import Overloaded, RequestError, Unsupported

if TYPE_CHECKING:
    from quire.engine.core.adapter_store import AdapterStore

ClientId = TypeVar("ClientId", bytes, int)

SLEEPING_RETRY_S = 5.0


class _Outbox:
    """Updates and replies for one client, sent after the step."""

    __slots__ = ("client_id", "replies", "updates")

    def __init__(self, sender: Any) -> None:
        self.client_id = sender
        self.updates: list[Update] = []
        self.replies: list[CallReply] = []


class _OwnedRequest:
    """An unfinished request: the outbox of its client, and the indexes of its live sequences.

    held_updates: by sequence, if they are sent at the end only; None: sent as they come.
    """

    __slots__ = ("held_updates", "live_indexes", "outbox", "tenant")

    def __init__(self, box: _Outbox, request: Request) -> None:
        self.outbox = box
        self.tenant = request.tenant
        ended = {i for i, tokens in enumerate(request.resumed_tokens) if tokens is None}
        self.live_indexes = set(range(request.n)) - ended
        params = request.params
        at_end = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop_strings
        # The client needs the token count of a request that may kill the engine again.
        at_end = at_end and not request.engine_crashes
        self.held_updates: dict[int, list[Update]] | None = {} if at_end else None


class EngineRpc:
    """Serves any number of clients with one engine. Called by one thread."""

    def __init__(
        self,
        engine: EngineCore,
        checks: Iterable[ParamCheck] = (),
        adapters: AdapterStore | None = None,
    ) -> None:
        """adapters: None: the engine serves none."""
        self.engine = engine
        self._adapters = None if adapters is None else AdapterCalls(adapters)
        self._param_checks = tuple(checks)  # by logits processors, which exist in this process only
        self._outboxes: dict[Any, _Outbox] = {}
        self._owned: dict[str, _OwnedRequest] = {}
        self._sleeping_tags: frozenset[str] = frozenset()
        # A sleep() that waits for the last request: its client, its call id, its tags.
        self._pending_sleep: tuple[_Outbox, int, frozenset[str]] | None = None
        self._profile: TorchProfile | None = None
        self._methods: dict[str, Callable[..., Any]] = {
            "stats": self._stats,
            "check": engine.check,
            "snapshot": engine.snapshot,
            "abort_named": self._abort_named,
            "reset_prefix_cache": self._reset_prefix_cache,
            "reset_encoder_cache": engine.reset_encoder_cache,
            "wake_up": self._wake_up,
            "adapters": lambda: [] if self._adapters is None else self._adapters.cards(),
            "unload_adapter": lambda *args: self._require_adapters().unload(*args),
            "pin_adapter": lambda name: self._require_adapters().pin(name),
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }

    @property
    def idle(self) -> bool:
        """Whether there is no step to run and nothing to send."""
        if any(box.updates or box.replies for box in self._outboxes.values()):
            return False
        if self._adapters is not None and self._adapters.has_results:
            return False
        if "scheduling" in self._sleeping_tags:
            return True
        return self.engine.idle and not (self._pending_sleep is not None and self.engine.empty)

    @property
    def empty(self) -> bool:
        """Whether there are no requests, and nothing sleeps."""
        return self.idle and self.engine.empty and not self._sleeping_tags and not self._owned

    @property
    def num_requests(self) -> int:
        """Unfinished requests, running or waiting."""
        return len(self._owned)

    @property
    def is_sleeping(self) -> bool:
        """Whether something sleeps, steps included."""
        return bool(self._sleeping_tags)

    def heartbeat(self) -> HeartbeatMessage:
        """The heartbeat, for every client."""
        return HeartbeatMessage(tuple(sorted(self._sleeping_tags)))

    def remove_client(self, sender: Any) -> None:
        """Abort the requests of a client that is gone, and send it nothing more."""
        box = self._outboxes.get(sender)
        if box is None:
            return
        for request_id in [one for one, owned in self._owned.items() if owned.outbox is box]:
            self._abort(request_id)
        if self._pending_sleep is not None and self._pending_sleep[0] is box:
            self._pending_sleep = None
        del self._outboxes[sender]

    def client_ids(self) -> list[Any]:
        return list(self._outboxes)

    # -- messages -----------------------------------------------------------------------------

    def handle(self, sender: Any, message: MessageToEngine) -> MessageFromEngine | None:
        """Handle a message. Returns what to send at once. Never raises: errors become replies."""
        box = self._outboxes.get(sender)
        if box is None:
            box = self._outboxes[sender] = _Outbox(sender)
        if isinstance(message, AddRequests):
            self._reply_with(box, message.call_id, self._add_requests, box, message)
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._abort(request_id)
        elif isinstance(message, AbortSequence):
            self._abort_sequence(message)
        elif isinstance(message, Hello):
            self.remove_client(sender)  # what it had is lost to it: its connection was
            self._outboxes[sender] = _Outbox(sender)
            return self._handshake(message)
        elif message.method == "load_adapter":
            self._reply_with(box, message.call_id, self._load_adapter, box, message)
        elif message.method == "sleep":
            self._reply_with(box, message.call_id, self._sleep, box, message)
        else:
            self._reply_with(box, message.call_id, self._call, message)
        return None

    def _reply_with(self, box: _Outbox, number: int, what: Callable[..., Any], *args: Any) -> None:
        try:
            value = what(*args)
        except Exception as error:  # noqa: BLE001 - a border: it goes to the caller
            box.replies.append(CallReply(number, error=error_to_wire(error)))
        else:
            if value is not _DEFERRED:
                box.replies.append(CallReply(number, value))

    def _handshake(self, hello: Hello) -> MessageFromEngine:
        if hello.protocol != PROTOCOL_VERSION:
            why = (
                f"{hello.client_name} has protocol version {hello.protocol}, this engine "
                f"{PROTOCOL_VERSION}: two versions of quire are mixed; restart all processes"
            )
            return EngineDeadMessage(why, version_mismatch=True)
        return EngineReady(PROTOCOL_VERSION, time.monotonic())

    def _add_requests(self, box: _Outbox, message: AddRequests) -> None:
        """Add all, or none if one is refused."""
        self._check_not_sleeping()
        requests = [request_from_wire(one) for one in message.requests]
        self.engine.check_batch(requests)
        added: list[str] = []
        try:
            for one in requests:
                self._add_request(box, one)
                added.append(one.id)
        except Exception:
            for request_id in added:
                self.engine.abort(request_id)
                del self._owned[request_id]
            raise

    def _add_request(self, box: _Outbox, request: Request) -> None:
        for check in self._param_checks:
            try:
                check(request.params)
            except RequestError:
                raise
            except ValueError as error:
                raise RequestError(str(error), param="extra_args") from error
        check_tensors(request)
        self.engine.add(request)
        self._owned[request.id] = _OwnedRequest(box, request)

    def _check_not_sleeping(self) -> None:
        if (
            "kv_cache" in self._sleeping_tags
            or "weights" in self._sleeping_tags
            or self._pending_sleep
        ):
            message = "the engine sleeps: wake it up first (POST /wake_up, or wake_up())"
            raise Overloaded(message, retry_after_s=SLEEPING_RETRY_S)

    def _abort(self, request_id: str) -> None:
        self._route_updates(self.engine.abort(request_id))

    def _abort_sequence(self, message: AbortSequence) -> None:
        owned = self._owned.get(message.request_id)
        if owned is None or message.index not in owned.live_indexes:
            return
        self.engine.abort_sequence(message.request_id, message.index)
        self._remove_sequence(owned, message.request_id, message.index)

    def _call(self, message: UtilityCall) -> Any:
        function = self._methods.get(message.method)
        if function is None:
            raise RequestError(f"the engine has no call {message.method!r}")
        return function(*message.args)

    # -- steps --------------------------------------------------------------------------------

    def run_step(self) -> list[tuple[Any, OutputBatch]]:
        """Run a step if there is one. Returns the batch of each client that has outputs."""
        if self._adapters is not None and self._adapters.has_results:
            for box, number, finish in self._adapters.take_results():
                self._reply_with(box, number, finish)
        if "scheduling" not in self._sleeping_tags:
            self._route_updates(self.engine.step())
            if self._pending_sleep is not None and self.engine.empty:
                self._finish_pending_sleep(self._pending_sleep)
        batches = []
        load = self.engine.load
        for box in self._outboxes.values():
            if box.updates or box.replies:
                batches.append((box.client_id, OutputBatch(box.updates, box.replies, load)))
                box.updates, box.replies = [], []
        return batches

    def _route_updates(self, updates: Iterable[Update]) -> None:
        owners = self._owned
        for update in updates:
            owned = owners.get(update.request_id)
            if owned is None:
                continue
            if owned.held_updates is None:
                owned.outbox.updates.append(update)
            else:
                kept = owned.held_updates.setdefault(update.index, [])
                kept.append(update)
                if update.finish is not None:
                    owned.outbox.updates.append(coalesce(kept))
            if update.finish is not None:
                self._remove_sequence(owned, update.request_id, update.index)

    def _remove_sequence(self, owned: _OwnedRequest, request_id: str, index: int) -> None:
        owned.live_indexes.discard(index)
        if not owned.live_indexes:
            del self._owned[request_id]

    # -- calls --------------------------------------------------------------------------------

    def _stats(self) -> SchedulerStats:
        return self.engine.stats()

    def _abort_named(self, names: Sequence[str], tenant: bytes | None = None) -> int:
        """Abort requests by the id that users have: without its last -N. Returns their number.

        tenant: only requests of this tenant; None: of any.
        """
        wanted = frozenset(names)
        found = [
            one
            for one, owned in self._owned.items()
            if one.rpartition("-")[0] in wanted and tenant in (None, owned.tenant)
        ]
        for request_id in found:
            self._abort(request_id)
        return len(found)

    def _abort_all(self) -> None:
        for request_id in list(self._owned):
            self._abort(request_id)

    def _reset_prefix_cache(self, reset_running: bool = False) -> bool:
        if reset_running:
            self._abort_all()
        return self.engine.reset_prefix_cache()

    def _sleep(self, box: _Outbox, message: UtilityCall) -> Any:
        """args: level, mode, clear_cache. "wait" is answered when the last request has ended."""
        level, mode, clear_cache = message.args
        sleep_mode.check_sleep_args(level, mode)
        tags = sleep_mode.tags_at_level(level) | (
            frozenset(("clear",)) if clear_cache else frozenset()
        )
        if mode == "abort":
            self._abort_all()
        elif mode == "wait" and not self.engine.empty and not self._sleeping_tags:
            if self._pending_sleep is not None:
                raise RequestError("a sleep() with mode='wait' is already pending")
            self._pending_sleep = (box, message.call_id, tags)
            return _DEFERRED
        elif mode == "keep" and self._owned and tags & {"kv_cache", "clear"}:
            raise RequestError(
                "mode='keep' keeps requests, but their KV would be freed: use level 0 without "
                "clear_cache, or another mode",
                param="mode",
            )
        self._enter_sleep(tags)
        return sorted(self._sleeping_tags)

    def _finish_pending_sleep(self, pending: tuple[_Outbox, int, frozenset[str]]) -> None:
        box, number, tags = pending
        self._pending_sleep = None
        self._enter_sleep(tags)
        box.replies.append(CallReply(number, sorted(self._sleeping_tags)))

    def _enter_sleep(self, tags: frozenset[str]) -> None:
        if "kv_cache" in tags:
            self.engine.release_kv_memory()
        elif "clear" in tags:
            self.engine.reset_prefix_cache()
        self._sleeping_tags |= tags - {"clear"}

    def _wake_up(self, tags: list[str] | None = None) -> list[str]:
        """Returns the tags that still sleep."""
        self._sleeping_tags = sleep_mode.tags_after_wake_up(self._sleeping_tags, tags)
        return sorted(self._sleeping_tags)

    def _load_adapter(self, box: _Outbox, message: UtilityCall) -> Any:
        """args: those of AdapterLoad. Answered when its files were read."""
        wanted = AdapterLoad(*message.args)
        loaded = self._require_adapters().load(box, message.call_id, wanted)
        return _DEFERRED if loaded is None else loaded

    def _require_adapters(self) -> AdapterCalls:
        if self._adapters is None:
            raise Unsupported("this engine serves no adapters: start it with --enable-lora")
        return self._adapters

    def _start_profile(self) -> None:
        if self._profile is not None:
            raise RequestError("a profile is already being recorded: stop it first")
        self._profile = TorchProfile.start(None, {})

    def _stop_profile(self) -> str:
        """Returns the path of the trace."""
        if self._profile is None:
            raise RequestError("no profile is being recorded: start one first")
        profile, self._profile = self._profile, None
        return str(profile.stop())


_DEFERRED = object()
"""The result of a call that is answered after a later step."""
