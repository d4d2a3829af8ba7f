"""Sequence timing: divides the time of a sequence in the engine into phases without gaps.

    accepted_at                                                                        ended_at
    |-- grammar --|-- queue --|-- prefill, others --|-- decode, others --|-- preempted --|-- ...

A step is shared, so its time is divided by tokens: for a running sequence, the time of prompt
tokens of other requests is `others`, and the rest belongs to its own phase. Plain data; made by
quire.core.accounting.time_accounting. The first and the last Update of a sequence have one; if the
request is `timed`, each has.
"""

from __future__ import annotations

from typing import NamedTuple

TimeBreakdown = tuple[float, float, float, float, float, float, float, float]
BREAKDOWN_FIELDS = (
    "grammar",
    "queue",
    "prefill",
    "others",
    "preempted",
    "decode",
    "engine_other",
    "compile",
)
BREAKDOWN_WITH_RECOVERY_FIELDS = (*BREAKDOWN_FIELDS, "recovery")
"""These phases, and the time between two engines, which neither of them can measure."""


class QueueAtArrival(NamedTuple):
    """The queue at the time when a request joined it."""

    requests: int
    """Requests that waited."""
    tokens: int
    """Tokens of their prompts."""
    of_others: int
    """Waiting requests with another API key."""
    running: int
    """Running sequences."""


class SequenceTiming(NamedTuple):
    """Times of the monotonic clock, and seconds. The phases sum to ended_at - accepted_at."""

    accepted_at: float
    """The engine accepted the request."""
    ended_at: float
    """Time of the token, or of the end, that this timing came with."""
    first_token_at: float | None
    grammar: float
    """Waited until the grammar of its output was compiled."""
    queue: float
    """Waited for a slot and for blocks."""
    prefill: float
    """Its prompt was computed."""
    others: float
    """Its steps computed prompt tokens of other requests."""
    preempted: float
    """Waited after it had lost its blocks, and recomputed tokens up to where it had been."""
    decode: float
    """Its tokens were generated, one a step."""
    engine_other: float
    """It ran, but no step did: the engine read messages, sent updates, or was delayed."""
    compile: float
    """Its steps waited for kernels or CUDA graphs that start-up had not prepared."""
    preemptions: int = 0
    """Number of preemptions."""
    recovery: float = 0.0
    """From the crash of its engine until another engine had recomputed its tokens."""
    queue_at_arrival: QueueAtArrival | None = None
    """The queue when the request joined it; None: it never reached the queue."""
    prompt_steps: int = 0
    """Number of steps that computed its prompt."""
    step_before: tuple[float, float] | None = None
    """Start and end of the last step before it was accepted; requests that come meanwhile wait."""

    @classmethod
    def starting_at(cls, at: float) -> SequenceTiming:
        """The timing of a sequence that is accepted at that moment."""
        return cls(at, at, None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def total(self) -> float:
        """Sum of the phases in seconds."""
        return self.ended_at - self.accepted_at

    @property
    def scheduled_at(self) -> float:
        """When it first got a slot."""
        return self.accepted_at + self.grammar + self.queue

    @property
    def breakdown(self) -> TimeBreakdown:
        """The phases, in the order of BREAKDOWN_FIELDS."""
        return (
            self.grammar,
            self.queue,
            self.prefill,
            self.others,
            self.preempted,
            self.decode,
            self.engine_other,
            self.compile,
        )

    @property
    def breakdown_with_recovery(self) -> tuple[float, ...]:
        """All, in the order of BREAKDOWN_WITH_RECOVERY_FIELDS."""
        return (*self.breakdown, self.recovery)

    def extended_to(self, at: float) -> SequenceTiming:
        """Extend the timing of a sequence that generated until its engine crashed at time `at`."""
        if self.first_token_at is None or at <= self.ended_at:
            return self
        return self._replace(ended_at=at, decode=self.decode + at - self.ended_at)

    def followed_by(self, after: SequenceTiming) -> SequenceTiming:
        """Join two timings: this one until an engine crashed, the other from the next engine on.

        Time to recompute what this one had is recovery; if it had computed nothing, only the gap
        between the two is.
        """
        recovery = after.accepted_at - self.ended_at
        if self.first_token_at is not None:
            recovery += after.grammar + after.queue + after.prefill
            after = after._replace(
                first_token_at=self.first_token_at, grammar=0.0, queue=0.0, prefill=0.0
            )
        return after._replace(
            accepted_at=self.accepted_at,
            grammar=self.grammar + after.grammar,
            queue=self.queue + after.queue,
            prefill=self.prefill + after.prefill,
            others=self.others + after.others,
            preempted=self.preempted + after.preempted,
            decode=self.decode + after.decode,
            engine_other=self.engine_other + after.engine_other,
            compile=self.compile + after.compile,
            preemptions=self.preemptions + after.preemptions,
            recovery=self.recovery + after.recovery + recovery,
            queue_at_arrival=after.queue_at_arrival
            if self.queue_at_arrival is None
            else self.queue_at_arrival,
            prompt_steps=self.prompt_steps + after.prompt_steps,
            step_before=self.step_before,
        )
