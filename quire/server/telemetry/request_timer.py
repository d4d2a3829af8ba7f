"""Times one HTTP request, from its first byte here to the last byte of its answer.

    received_at    handed_at    accepted_at                       ended_at        now
    |-- prepare --|- transport -|-- breakdown of the engine ------|-- the rest ---|

The rest is what this process still did when the engine was done: text work (`detokenize`), waiting
for the client to take what was sent (`client`), and the time between (`transport`). Work done while
the engine still ran delayed nothing and is not counted. `inbox` is the part of the way to the
engine in which the engine ran a step and did not read its inbox.

The middleware makes one `RequestTimer` per HTTP request. It takes times only after `enable()`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Message, Send

from quire.core.sequence_timing import BREAKDOWN_WITH_RECOVERY_FIELDS, SequenceTiming
from quire.core.types import Request as CoreRequest
from quire.core.types import Update
from quire.server.generation.events import GenerationEvent
from quire.text.input_processor import PreparedRequest

TIMER_SCOPE_KEY = "quire.watch"
"""Where a Watch is in the scope of its request."""

MAX_INTERVALS = 16
"""So many intervals are remembered; only those after the engine's end are looked at."""


class RequestObserver(Protocol):
    """Observer of a request: the request log, and traces."""

    @property
    def logs_answers(self) -> bool:
        """on_events() is to be called."""
        ...

    def on_submitted(
        self, headers: Mapping[str, str], public_id: str, prepared: Sequence[PreparedRequest]
    ) -> None:
        """These requests are given to the engine now."""
        ...

    def on_pooling_submitted(
        self, headers: Mapping[str, str], public_id: str, requests: Sequence[CoreRequest]
    ) -> None:
        """These pooling requests of one body are given to the engine now."""
        ...

    def on_events(
        self, public_id: str, texts: dict[int, str], events: Sequence[GenerationEvent]
    ) -> None:
        """A generation yielded these events. texts: for the observer, to keep the text before."""
        ...


class RequestTimer:
    """Looks at one HTTP request. Written by its task only."""

    def __init__(
        self,
        received_at: float,
        headers: Mapping[str, str],
        sink: RequestObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.received_at = received_at
        """When the request came, monotonic seconds."""
        self.logs_answers = sink is not None and sink.logs_answers
        self.is_enabled = False
        self.request_ids: tuple[str, ...] = ()
        """Of the engine's requests that were made of it."""
        self.public_id = ""
        """The id in the answer; empty before anything was handed to the engine."""
        self._headers = headers
        self._observer = sink
        self._clock = clock
        self._first_choice: dict[str, int] = {}  # request -> index of its first choice
        self._submitted_at: float | None = None
        self._timings: dict[int, SequenceTiming] = {}  # by choice
        self._texts: dict[int, str] = {}  # by choice
        self._tokens = 0
        self._state, self._state_since = "prepare", received_at
        self._intervals: deque[tuple[str, float, float]] = deque(maxlen=MAX_INTERVALS)

    # -- what routes say ----------------------------------------------------------------------

    def enable(self) -> None:
        """Take times from now on."""
        self.is_enabled = True

    def record_submitted(self, public_id: str, prepared: Sequence[PreparedRequest]) -> None:
        """The requests are given to the engine now."""
        self._start_waiting(public_id, [one.request for one in prepared])
        if self._observer is not None:
            self._observer.on_submitted(self._headers, public_id, prepared)

    def record_pooling_submitted(self, public_id: str, requests: Sequence[CoreRequest]) -> None:
        """The pooling requests of one body are given to the engine now."""
        self._start_waiting(public_id, requests)
        if self._observer is not None:
            self._observer.on_pooling_submitted(self._headers, public_id, requests)

    def _start_waiting(self, public_id: str, requests: Sequence[CoreRequest]) -> None:
        self._submitted_at = self._clock()
        self.public_id = public_id
        self.request_ids = tuple(one.id for one in requests)
        if not self.is_enabled:
            return
        first = 0
        for one in requests:
            self._first_choice[one.id] = first
            first += one.n
        self._enter_state("wait", self._clock())

    def record_updates(self, updates: Sequence[Update]) -> None:
        """These came from the engine; now they become text."""
        self._enter_state("text", self._clock())
        for update in updates:
            self._tokens += len(update.token_ids)
            first = self._first_choice.get(update.request_id)
            if update.timing is not None and first is not None:
                self._timings[first + update.index] = update.timing

    def record_waiting(self) -> None:
        """There is nothing to do until more comes."""
        self._enter_state("wait", self._clock())

    def report_events(self, events: Sequence[GenerationEvent]) -> None:
        """Report the events that the client gets."""
        if self._observer is not None:
            self._observer.on_events(self.public_id, self._texts, events)

    async def send_timed(self, send: Send, message: Message) -> None:
        """Send, and note how long the client lets us wait."""
        self._enter_state("send", self._clock())
        await send(message)
        self._enter_state("wait", self._clock())

    # -- results --------------------------------------------------------------------------------

    def breakdown(self) -> dict[str, Any] | None:
        """Seconds by cause, up to now; they sum to total_s. None: the engine has not answered.

        With several choices the causes are those of the last to end; `choices` has all of them.
        """
        now = self._clock()
        if not self._timings or self._submitted_at is None:
            return None
        last = max(self._timings.values(), key=lambda timing: timing.ended_at)
        text = self._seconds_in_state("text", last.ended_at, now)
        client = self._seconds_in_state("send", last.ended_at, now)
        total = now - self.received_at
        prepare = self._submitted_at - self.received_at
        inbox = _inbox_seconds(last, self._submitted_at)
        found: dict[str, Any] = {
            "total_s": total,
            "prepare_s": prepare,
            "transport_s": max(total - prepare - inbox - last.total - text - client, 0.0),
            "inbox_s": inbox,
            **_seconds_by_cause(last),
            "detokenize_s": text,
            "client_s": client,
        }
        found["queued_behind"] = last.queue_at_arrival and last.queue_at_arrival._asdict()
        found["prompt_steps"] = last.prompt_steps
        if len(self._timings) > 1:
            found["choices"] = [
                {"index": choice, "preemptions": timing.preemptions, **_seconds_by_cause(timing)}
                for choice, timing in sorted(self._timings.items())
            ]
        else:
            found["preemptions"] = last.preemptions
        return found

    def latency_metrics(self) -> dict[str, float | None] | None:
        """Times in milliseconds by the names that clients know. None for several choices.

        The first token counts from when the engine turned to the request.
        """
        if len(self._timings) != 1 or len(self._first_choice) != 1:
            return None
        (timing,) = self._timings.values()
        first = timing.first_token_at
        if first is None:
            return None
        spent = timing.ended_at - first
        more = self._tokens - 1
        return {
            "time_to_first_token_ms": (first - timing.scheduled_at) * 1e3,
            "generation_time_ms": spent * 1e3,
            "queue_time_ms": (timing.scheduled_at - timing.accepted_at) * 1e3,
            "mean_itl_ms": spent / more * 1e3 if more > 0 else None,
            "tokens_per_second": self._tokens / spent if spent > 0.0 else None,
        }

    def _enter_state(self, state: str, now: float) -> None:
        if self.is_enabled:
            self._intervals.append((self._state, self._state_since, now))
            self._state, self._state_since = state, now

    def _seconds_in_state(self, state: str, since: float, now: float) -> float:
        """Seconds in a state, of those after `since`."""
        marks = [*self._intervals, (self._state, self._state_since, now)]
        return sum(max(end - max(start, since), 0.0) for kind, start, end in marks if kind == state)


def get_request_timer(http: Request) -> RequestTimer:
    """The Watch of this request; one that began now, if the app is not observed."""
    found = http.scope.get(TIMER_SCOPE_KEY)
    if found is None:
        found = http.scope[TIMER_SCOPE_KEY] = RequestTimer(time.monotonic(), http.headers)
    assert isinstance(found, RequestTimer), found
    return found


def wrap_send(seen: RequestTimer, send: Send, began: Callable[[Message], None]) -> Send:
    """`send` for an observed request: it passes messages on at next to no cost.

    began: called with the message that has the status.
    """

    def observed(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            began(message)
        if seen.is_enabled:
            return seen.send_timed(send, message)
        return send(message)

    return observed


def _inbox_seconds(timing: SequenceTiming, handed_at: float) -> float:
    """Seconds from sending a request to the engine until a step was over and it was read."""
    if timing.step_before is None:
        return 0.0
    began, ended = timing.step_before
    return max(min(ended, timing.accepted_at) - max(began, handed_at), 0.0)


def _seconds_by_cause(timing: SequenceTiming) -> dict[str, float]:
    return {
        f"{name}_s": seconds
        for name, seconds in zip(BREAKDOWN_WITH_RECOVERY_FIELDS, timing.breakdown_with_recovery)
    }
