"""Where the time of a sequence went: its life in the engine, cut without gaps.

    accepted_at                                                                        ended_at
    |-- grammar --|-- queue --|-- prefill, others --|-- decode, others --|-- preempted --|-- ...

A step is shared, so its time is shared out by tokens: to a sequence aboard, what went into prompt
tokens of other requests is `others`, and the rest is its own phase. Plain data; made by
quire.core.ledger, and carried by the first and the last Update of a sequence (by each one, if the
request is `timed`).
"""

from __future__ import annotations

from typing import NamedTuple

Cuts = tuple[float, float, float, float, float, float, float]
CUTS = ("grammar", "queue", "prefill", "others", "preempted", "decode", "engine_other")


class Timing(NamedTuple):
    """Stamps of the monotonic clock and seconds. The seven cuts sum to ended_at - accepted_at."""

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

    @property
    def total(self) -> float:
        """Seconds that the cuts explain."""
        return self.ended_at - self.accepted_at

    @property
    def aboard_at(self) -> float:
        """When it first got a slot."""
        return self.accepted_at + self.grammar + self.queue

    @property
    def cuts(self) -> Cuts:
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
