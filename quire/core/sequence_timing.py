"""Where the time of a sequence went: its life in the engine, cut without gaps.

    accepted_at                                                                        ended_at
    |-- grammar --|-- queue --|-- prefill, others --|-- decode, others --|-- preempted --|-- ...

A step is shared, so its time is shared out by tokens: to a sequence aboard, what went into prompt
tokens of other requests is `others`, and the rest is its own phase. Plain data; made by
quire.core.accounting.time_accounting, and carried by the first and the last Update of a sequence
(by each one, if the
request is `timed`).
"""

from __future__ import annotations

from typing import NamedTuple

TimeBreakdown = tuple[float, float, float, float, float, float, float]
BREAKDOWN_FIELDS = ("grammar", "queue", "prefill", "others", "preempted", "decode", "engine_other")
BREAKDOWN_WITH_RECOVERY_FIELDS = (*BREAKDOWN_FIELDS, "recovery")
"""With what no engine can tell of: between two of them."""


class QueueAtArrival(NamedTuple):
    """What was there already when a request came to wait for its turn."""

    requests: int
    """Waited, as it did."""
    tokens: int
    """Of their prompts."""
    of_others: int
    """So many of those requests came with another key."""
    running: int
    """Sequences that had a seat."""


class SequenceTiming(NamedTuple):
    """Stamps of the monotonic clock and seconds. The causes sum to ended_at - accepted_at."""

    accepted_at: float
    """The engine took the request in."""
    ended_at: float
    """The moment that this tells of: the token, or the end, it came with was known."""
    first_token_at: float | None
    grammar: float
    """Waited until the grammar of its output was compiled."""
    queue: float
    """Waited for a slot and for blocks."""
    prefill: float
    """Its prompt was computed."""
    others: float
    """Its steps were spent on prompt tokens of other requests."""
    preempted: float
    """Waited after it had lost its blocks, and was computed again up to where it had been."""
    decode: float
    """Its tokens were generated, one a step."""
    engine_other: float
    """It ran, but no step did: the engine read messages, sent news, or was held up."""
    preemptions: int = 0
    """How often it lost its blocks."""
    recovery: float = 0.0
    """An engine died with it aboard: until another had brought it back to where it had been."""
    queue_at_arrival: QueueAtArrival | None = None
    """Whom it found waiting when it came to the queue; None: it did not come so far."""
    prompt_steps: int = 0
    """Steps that its prompt was computed in."""
    step_before: tuple[float, float] | None = None
    """The last step before it was taken in, from when to when: what comes meanwhile waits."""

    @classmethod
    def starting_at(cls, moment: float) -> SequenceTiming:
        """Of one that is accepted at that moment."""
        return cls(moment, moment, None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def total(self) -> float:
        """Seconds that the cuts explain."""
        return self.ended_at - self.accepted_at

    @property
    def scheduled_at(self) -> float:
        """When it first got a slot."""
        return self.accepted_at + self.grammar + self.queue

    @property
    def breakdown(self) -> TimeBreakdown:
        """The seven, in the order of CUTS."""
        return (
            self.grammar,
            self.queue,
            self.prefill,
            self.others,
            self.preempted,
            self.decode,
            self.engine_other,
        )

    @property
    def breakdown_with_recovery(self) -> tuple[float, ...]:
        """All, in the order of CAUSES."""
        return (*self.breakdown, self.recovery)

    def extended_to(self, at: float) -> SequenceTiming:
        """This one, told of a sequence that spoke until its engine died, at that moment."""
        if self.first_token_at is None or at <= self.ended_at:
            return self
        return self._replace(ended_at=at, decode=self.decode + at - self.ended_at)

    def followed_by(self, after: SequenceTiming) -> SequenceTiming:
        """Both as one: this one up to the death of an engine, the other from the next one.

        What that needed to get where this one had been is recovery; if that was nowhere, only the
        time between the two is.
        """
        lost = after.accepted_at - self.ended_at
        if self.first_token_at is not None:
            lost += after.grammar + after.queue + after.prefill
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
            preemptions=self.preemptions + after.preemptions,
            recovery=self.recovery + after.recovery + lost,
            queue_at_arrival=after.queue_at_arrival
            if self.queue_at_arrival is None
            else self.queue_at_arrival,
            prompt_steps=self.prompt_steps + after.prompt_steps,
            step_before=self.step_before,
        )
