"""Request timers: state that TimeAccounting keeps per sequence and per step in flight."""

from __future__ import annotations

from enum import Enum, auto

from quire.core.sequence_timing import QueueAtArrival, SequenceTiming, TimeBreakdown
from quire.core.types import Request, Sequence


class SequencePhase(Enum):
    """The phase that the time of a sequence is currently attributed to."""

    RESOURCE_WAIT = auto()  # waits outside of the queue until its grammar is compiled
    QUEUE = auto()
    PREFILL = auto()
    DECODE = auto()
    PREEMPTED = auto()  # preempted and waiting
    RECOMPUTE = auto()  # running again, recomputes tokens up to where it was preempted


class SequenceTimer:
    """Timer of one sequence. `since` and the fields of its clocks refer to the current phase."""

    __slots__ = (
        "accepted_at",
        "breakdown",
        "compile_clock_at_start",
        "first_token_at",
        "group",
        "index",
        "overhead_clock_at_start",
        "own_prefill_s",
        "phase",
        "planned",
        "preemptions",
        "prefill_clock_at_start",
        "prompt_steps",
        "seq",
        "since",
    )

    def __init__(
        self, group: RequestTimerGroup, index: int, now: float, phase: SequencePhase
    ) -> None:
        self.group = group
        self.index = index
        self.accepted_at = self.since = now
        self.phase = phase
        self.prefill_clock_at_start = self.overhead_clock_at_start = 0.0
        self.compile_clock_at_start = self.own_prefill_s = 0.0
        self.breakdown: TimeBreakdown = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self.first_token_at: float | None = None
        self.seq: Sequence | None = None  # while it runs, according to the latest plan
        self.planned = 0  # tokens planned by the latest plan, while a prompt is computed
        self.preemptions = 0
        self.prompt_steps = 0


class RequestTimerGroup:
    """Timers of the sequences of one request; None for a sequence that has ended."""

    __slots__ = (
        "first_prefill_timing",
        "num_unfinished",
        "queue_at_arrival",
        "queued",
        "step_before",
        "tenant",
        "timers",
        "tokens",
    )

    def __init__(
        self, request: Request, now: float, phase: SequencePhase = SequencePhase.QUEUE
    ) -> None:
        ended = {i for i, tokens in enumerate(request.resumed_tokens) if tokens is None}
        self.timers: list[SequenceTimer | None] = [
            None if i in ended else SequenceTimer(self, i, now, phase) for i in range(request.n)
        ]
        self.num_unfinished = request.n - len(ended)  # members that have not ended
        self.first_prefill_timing: SequenceTiming | None = (
            None  # timing of the first sequence whose prompt was computed
        )
        self.queued = False  # all of its sequences wait in the queue
        self.queue_at_arrival: QueueAtArrival | None = None
        self.step_before: tuple[float, float] | None = None
        self.tenant = request.tenant
        self.tokens = len(request.prompt)


class QueueDepth:
    """Counts requests without any sequence that ever ran, and the tokens of their prompts."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self._requests_by_tenant: dict[bytes, int] = {}  # requests per tenant

    def add(self, group: RequestTimerGroup, running: int) -> None:
        """Count a request that starts to wait behind those already counted."""
        same_tenant = self._requests_by_tenant.get(group.tenant, 0)
        group.queue_at_arrival = QueueAtArrival(
            self.requests, self.tokens, self.requests - same_tenant, running
        )
        group.queued = True
        self.requests += 1
        self.tokens += group.tokens
        self._requests_by_tenant[group.tenant] = same_tenant + 1

    def remove(self, group: RequestTimerGroup) -> None:
        """Stop counting a request. Does nothing for one that is not counted."""
        if not group.queued:
            return
        group.queued = False
        self.requests -= 1
        self.tokens -= group.tokens
        self._requests_by_tenant[group.tenant] -= 1
        if not self._requests_by_tenant[group.tenant]:
            del self._requests_by_tenant[group.tenant]


class PrefillChunk:
    """Prompt tokens of one sequence in a plan."""

    __slots__ = ("samples", "timer", "tokens")

    def __init__(self, account: SequenceTimer, tokens: int, samples: bool) -> None:
        self.timer = account
        self.tokens = tokens
        self.samples = samples


class TimedStep:
    """A step in flight: sequences that start, sequences that it preempts, prompt chunks, tokens."""

    __slots__ = ("chunks", "drafts", "joins", "preempted", "tokens")

    def __init__(
        self,
        joins: list[SequenceTimer],
        put_off: list[SequenceTimer],
        chunks: list[PrefillChunk],
        tokens: int,
        drafts: int = 0,
    ) -> None:
        self.joins = joins
        self.preempted = put_off
        self.chunks = chunks
        self.drafts = drafts
        self.tokens = tokens
