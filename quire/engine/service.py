"""The engine's half of the protocol (quire.engine.messages), without any socket or thread.

Whoever has the socket calls obey() for each message and turn() for each step, and sends what they
give. The one idea: a sender owns the requests it added; each turn makes one News for each sender
that has any. Nothing a sender says can hurt another's requests, or end the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from quire.core.params import RequestOutputKind
from quire.core.stats import SchedulerStats
from quire.core.types import Request, Update
from quire.engine import sleep
from quire.engine.front import Check
from quire.engine.loop import Engine
from quire.engine.merge import merged
from quire.engine.messages import (
    PROTOCOL,
    Abort,
    AbortSequence,
    Add,
    Answer,
    Beat,
    Call,
    Dead,
    FromEngine,
    Hello,
    News,
    Ready,
    ToEngine,
    fault_of,
    request_of,
)
from quire.engine.profile import Profile
from quire.errors import Overloaded, RequestError

log = logging.getLogger(__name__)

Sender = TypeVar("Sender", bytes, int)

SLEEPER_RETRY_S = 5.0


class _Box:
    """What one sender will be told at the end of the turn."""

    __slots__ = ("answers", "sender", "updates")

    def __init__(self, sender: Any) -> None:
        self.sender = sender
        self.updates: list[Update] = []
        self.answers: list[Answer] = []


class _Owned:
    """A request under way: its owner's box, and which of its sequences live.

    kept: updates by sequence, if they are wanted at the end only; None: told as they come.
    """

    __slots__ = ("box", "kept", "live", "tenant")

    def __init__(self, box: _Box, request: Request) -> None:
        self.box = box
        self.tenant = request.tenant
        ended = {i for i, said in enumerate(request.spoken) if said is None}
        self.live = set(range(request.n)) - ended
        params = request.params
        at_end = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop_strings
        at_end = at_end and not request.suspect  # how far it came is to be known if it kills again
        self.kept: dict[int, list[Update]] | None = {} if at_end else None


class Service:
    """Serves any number of senders over one engine. Called by one thread."""

    def __init__(self, engine: Engine, checks: Iterable[Check] = ()) -> None:
        self.engine = engine
        self._checks = tuple(checks)  # of logits processors, which live where the engine does
        self._boxes: dict[Any, _Box] = {}
        self._owned: dict[str, _Owned] = {}
        self._asleep: frozenset[str] = frozenset()
        self._falling: tuple[_Box, int, frozenset[str]] | None = None  # waits for the last request
        self._profile: Profile | None = None
        self._calls: dict[str, Callable[..., Any]] = {
            "stats": self._stats,
            "check": engine.check,
            "snapshot": engine.snapshot,
            "abort_named": self._abort_named,
            "reset_prefix_cache": self._reset_prefix_cache,
            "wake_up": self._wake_up,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }

    @property
    def idle(self) -> bool:
        """No step is to be made, and nothing waits to be told."""
        if any(box.updates or box.answers for box in self._boxes.values()):
            return False
        if "scheduling" in self._asleep:
            return True
        return self.engine.idle and not (self._falling is not None and self.engine.empty)

    @property
    def empty(self) -> bool:
        """Nobody is here, and nothing sleeps."""
        return self.idle and self.engine.empty and not self._asleep and not self._owned

    @property
    def requests(self) -> int:
        """Here, running or waiting."""
        return len(self._owned)

    @property
    def asleep(self) -> bool:
        """Something sleeps, or steps are not made."""
        return bool(self._asleep)

    def beat(self) -> Beat:
        """A sign of life, for every sender."""
        return Beat(tuple(sorted(self._asleep)))

    def forget(self, sender: Any) -> None:
        """It is gone: end what it asked for, and tell it nothing any more."""
        box = self._boxes.get(sender)
        if box is None:
            return
        for request_id in [one for one, owned in self._owned.items() if owned.box is box]:
            self._abort(request_id)
        if self._falling is not None and self._falling[0] is box:
            self._falling = None
        del self._boxes[sender]

    def senders(self) -> list[Any]:
        return list(self._boxes)

    # -- messages -----------------------------------------------------------------------------

    def obey(self, sender: Any, message: ToEngine) -> FromEngine | None:
        """Do what a message says; what to answer at once. Never raises: faults are answers."""
        box = self._boxes.get(sender)
        if box is None:
            box = self._boxes[sender] = _Box(sender)
        if isinstance(message, Add):
            self._try(box, message.number, self._add, box, message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._abort(request_id)
        elif isinstance(message, AbortSequence):
            self._abort_sequence(message)
        elif isinstance(message, Hello):
            return self._greet(message)
        elif message.name == "sleep":
            self._try(box, message.number, self._sleep, box, message)
        else:
            self._try(box, message.number, self._call, message)
        return None

    def _try(self, box: _Box, number: int, what: Callable[..., Any], *args: Any) -> None:
        try:
            value = what(*args)
        except Exception as error:  # noqa: BLE001 - a border: it goes to who asked
            box.answers.append(Answer(number, fault=fault_of(error)))
        else:
            if value is not _LATER:
                box.answers.append(Answer(number, value))

    def _greet(self, hello: Hello) -> FromEngine:
        if hello.protocol != PROTOCOL:
            theirs = f"{hello.name} speaks protocol {hello.protocol}, this engine {PROTOCOL}"
            why = f"{theirs}: two versions of quire are mixed; restart all of it"
            return Dead(why, mixed=True)
        return Ready(PROTOCOL)

    def _add(self, box: _Box, message: Add) -> None:
        """Add all, or none if one is refused."""
        self._check_awake()
        added: list[str] = []
        try:
            for one in message.requests:
                self._add_one(box, request_of(one))
                added.append(one.id)
        except Exception:
            for request_id in added:
                self.engine.abort(request_id)
                del self._owned[request_id]
            raise

    def _add_one(self, box: _Box, request: Request) -> None:
        for check in self._checks:
            try:
                check(request.params)
            except RequestError:
                raise
            except ValueError as error:
                raise RequestError(str(error), param="extra_args") from error
        self.engine.add(request)
        self._owned[request.id] = _Owned(box, request)

    def _check_awake(self) -> None:
        if "kv_cache" in self._asleep or "weights" in self._asleep or self._falling:
            message = "the engine sleeps: wake it up first (POST /wake_up, or wake_up())"
            raise Overloaded(message, retry_after_s=SLEEPER_RETRY_S)

    def _abort(self, request_id: str) -> None:
        self._route(self.engine.abort(request_id))

    def _abort_sequence(self, message: AbortSequence) -> None:
        owned = self._owned.get(message.request_id)
        if owned is None or message.index not in owned.live:
            return
        self.engine.abort_sequence(message.request_id, message.index)
        self._ended(owned, message.request_id, message.index)

    def _call(self, message: Call) -> Any:
        function = self._calls.get(message.name)
        if function is None:
            raise RequestError(f"the engine has no call {message.name!r}")
        return function(*message.args)

    # -- turns --------------------------------------------------------------------------------

    def turn(self) -> list[tuple[Any, News]]:
        """Make a step if there is one to make; what each sender is to be told."""
        if "scheduling" not in self._asleep:
            self._route(self.engine.step())
            if self._falling is not None and self.engine.empty:
                self._fall(self._falling)
        told = []
        for box in self._boxes.values():
            if box.updates or box.answers:
                told.append((box.sender, News(box.updates, box.answers)))
                box.updates, box.answers = [], []
        return told

    def _route(self, updates: Iterable[Update]) -> None:
        owners = self._owned
        for update in updates:
            owned = owners.get(update.request_id)
            if owned is None:
                continue
            if owned.kept is None:
                owned.box.updates.append(update)
            else:
                kept = owned.kept.setdefault(update.index, [])
                kept.append(update)
                if update.finish is not None:
                    owned.box.updates.append(merged(kept))
            if update.finish is not None:
                self._ended(owned, update.request_id, update.index)

    def _ended(self, owned: _Owned, request_id: str, index: int) -> None:
        owned.live.discard(index)
        if not owned.live:
            del self._owned[request_id]

    # -- calls --------------------------------------------------------------------------------

    def _stats(self) -> SchedulerStats:
        return self.engine.stats()

    def _abort_named(self, names: Sequence[str], tenant: bytes | None = None) -> int:
        """End requests by the id that clients know: without its last -N. How many there were.

        tenant: whose only; None: anybody's.
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

    def _sleep(self, box: _Box, message: Call) -> Any:
        """level, mode, clear_cache. "wait" is answered when the last request has ended."""
        level, mode, clear_cache = message.args
        sleep.check(level, mode)
        tags = sleep.asleep_at(level) | (frozenset(("clear",)) if clear_cache else frozenset())
        if mode == "abort":
            self._abort_all()
        elif mode == "wait" and not self.engine.empty and not self._asleep:
            if self._falling is not None:
                raise RequestError("the engine is falling asleep already")
            self._falling = (box, message.number, tags)
            return _LATER
        elif mode == "keep" and self._owned and tags & {"kv_cache", "clear"}:
            raise RequestError(
                "mode='keep' keeps requests, whose KV would be forgotten: use level 0 and no "
                "clear_cache, or another mode",
                param="mode",
            )
        self._close_eyes(tags)
        return sorted(self._asleep)

    def _fall(self, falling: tuple[_Box, int, frozenset[str]]) -> None:
        box, number, tags = falling
        self._falling = None
        self._close_eyes(tags)
        box.answers.append(Answer(number, sorted(self._asleep)))

    def _close_eyes(self, tags: frozenset[str]) -> None:
        if "kv_cache" in tags:
            self.engine.forget_kv()
        elif "clear" in tags:
            self.engine.reset_prefix_cache()
        self._asleep |= tags - {"clear"}

    def _wake_up(self, tags: list[str] | None = None) -> list[str]:
        """What still sleeps."""
        self._asleep = sleep.after_waking(self._asleep, tags)
        return sorted(self._asleep)

    def _start_profile(self) -> None:
        if self._profile is not None:
            raise RequestError("a profile is being recorded already: stop it first")
        self._profile = Profile.start(None, {})

    def _stop_profile(self) -> str:
        """Where the trace is."""
        if self._profile is None:
            raise RequestError("no profile is being recorded: start one first")
        profile, self._profile = self._profile, None
        return str(profile.stop())


_LATER = object()
"""A call that is answered by a later turn."""
