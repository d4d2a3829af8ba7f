"""Request timers: state of TimeAccounting for each sequence and each plan in flight."""

from __future__ import annotations

from enum import Enum, auto

from quire.core.sequence_timing import QueueAtArrival, SequenceTiming, TimeBreakdown
from quire.core.types import Request, Sequence


class SequencePhase(Enum):
    """Where a sequence is, as far as its time goes."""

    RESOURCE_WAIT = auto()  # out of the queue, until its grammar is there
    QUEUE = auto()
    PREFILL = auto()
    DECODE = auto()
    PREEMPTED = auto()  # preempted, and waiting
    RECOMPUTE = auto()  # aboard again, on the way to where it had been


class SequenceTimer:
    """Of one sequence. `since` and the three below it belong to the phase it is in."""

    __slots__ = (
        "accepted_at",
        "breakdown",
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
        self, family: RequestTimerGroup, index: int, now: float, phase: SequencePhase
    ) -> None:
        self.group = family
        self.index = index
        self.accepted_at = self.since = now
        self.phase = phase
        self.prefill_clock_at_start = self.overhead_clock_at_start = self.own_prefill_s = 0.0
        self.breakdown: TimeBreakdown = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self.first_token_at: float | None = None
        self.seq: Sequence | None = None  # while it is aboard, as far as was planned
        self.planned = 0  # tokens planned by the latest plan, while a prompt is computed
        self.preemptions = 0
        self.prompt_steps = 0


class RequestTimerGroup:
    """The sequences of one request; None where one has ended."""

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
        ended = {i for i, said in enumerate(request.resumed_tokens) if said is None}
        self.timers: list[SequenceTimer | None] = [
            None if i in ended else SequenceTimer(self, i, now, phase) for i in range(request.n)
        ]
        self.num_unfinished = request.n - len(ended)  # members that have not ended
        self.first_prefill_timing: SequenceTiming | None = (
            None  # of the first whose prompt was computed
        )
        self.queued = False  # all of it waits for its turn
        self.queue_at_arrival: QueueAtArrival | None = None
        self.step_before: tuple[float, float] | None = None
        self.tenant = request.tenant
        self.tokens = len(request.prompt)


class QueueDepth:
    """Requests none of whose sequences has had a seat yet, and the tokens of their prompts."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self._requests_by_tenant: dict[bytes, int] = {}  # requests, by tenant

    def add(self, family: RequestTimerGroup, running: int) -> None:
        """It waits from now on, behind those that are here."""
        own = self._requests_by_tenant.get(family.tenant, 0)
        family.queue_at_arrival = QueueAtArrival(
            self.requests, self.tokens, self.requests - own, running
        )
        family.queued = True
        self.requests += 1
        self.tokens += family.tokens
        self._requests_by_tenant[family.tenant] = own + 1

    def remove(self, family: RequestTimerGroup) -> None:
        """It waits no more. Harmless if it does not."""
        if not family.queued:
            return
        family.queued = False
        self.requests -= 1
        self.tokens -= family.tokens
        self._requests_by_tenant[family.tenant] -= 1
        if not self._requests_by_tenant[family.tenant]:
            del self._requests_by_tenant[family.tenant]


class PrefillChunk:
    """Tokens of one prompt in a plan."""

    __slots__ = ("samples", "timer", "tokens")

    def __init__(self, account: SequenceTimer, tokens: int, samples: bool) -> None:
        self.timer = account
        self.tokens = tokens
        self.samples = samples


class TimedStep:
    """A plan under way: who comes aboard, who was put off, and the prompts it computes."""

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
