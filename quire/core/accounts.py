"""What the ledger keeps of each sequence and of each plan under way. It alone writes here."""

from __future__ import annotations

from enum import Enum, auto

from quire.core.timing import Behind, Cuts, Timing
from quire.core.types import Request, Sequence


class Phase(Enum):
    """Where a sequence is, as far as its time goes."""

    KEPT = auto()  # out of the queue, until its grammar is there
    QUEUE = auto()
    PREFILL = auto()
    DECODE = auto()
    OUT = auto()  # preempted, and waiting
    REBUILD = auto()  # aboard again, on the way to where it had been


class Account:
    """Of one sequence. `since` and the three below it belong to the phase it is in."""

    __slots__ = (
        "accepted_at",
        "cuts",
        "family",
        "first_token_at",
        "index",
        "others",
        "outside",
        "own",
        "phase",
        "planned",
        "preemptions",
        "prompt_steps",
        "seq",
        "since",
    )

    def __init__(self, family: Family, index: int, now: float, phase: Phase) -> None:
        self.family = family
        self.index = index
        self.accepted_at = self.since = now
        self.phase = phase
        self.others = self.outside = self.own = 0.0
        self.cuts: Cuts = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self.first_token_at: float | None = None
        self.seq: Sequence | None = None  # while it is aboard, as far as was planned
        self.planned = 0  # tokens planned by the latest plan, while a prompt is computed
        self.preemptions = 0
        self.prompt_steps = 0


class Family:
    """The sequences of one request; None where one has ended."""

    __slots__ = (
        "behind",
        "left",
        "members",
        "prompt_done",
        "queued",
        "step_before",
        "tenant",
        "tokens",
    )

    def __init__(self, request: Request, now: float, phase: Phase = Phase.QUEUE) -> None:
        ended = {i for i, said in enumerate(request.spoken) if said is None}
        self.members: list[Account | None] = [
            None if i in ended else Account(self, i, now, phase) for i in range(request.n)
        ]
        self.left = request.n - len(ended)  # members that have not ended
        self.prompt_done: Timing | None = None  # of the first whose prompt was computed
        self.queued = False  # all of it waits for its turn
        self.behind: Behind | None = None
        self.step_before: tuple[float, float] | None = None
        self.tenant = request.tenant
        self.tokens = len(request.prompt)


class Queue:
    """Requests none of whose sequences has had a seat yet, and the tokens of their prompts."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self._of: dict[bytes, int] = {}  # requests, by tenant

    def enter(self, family: Family, running: int) -> None:
        """It waits from now on, behind those that are here."""
        own = self._of.get(family.tenant, 0)
        family.behind = Behind(self.requests, self.tokens, self.requests - own, running)
        family.queued = True
        self.requests += 1
        self.tokens += family.tokens
        self._of[family.tenant] = own + 1

    def leave(self, family: Family) -> None:
        """It waits no more. Harmless if it does not."""
        if not family.queued:
            return
        family.queued = False
        self.requests -= 1
        self.tokens -= family.tokens
        self._of[family.tenant] -= 1
        if not self._of[family.tenant]:
            del self._of[family.tenant]


class Chunk:
    """Tokens of one prompt in a plan."""

    __slots__ = ("account", "samples", "tokens")

    def __init__(self, account: Account, tokens: int, samples: bool) -> None:
        self.account = account
        self.tokens = tokens
        self.samples = samples


class Flight:
    """A plan under way: who comes aboard, who was put off, and the prompts it computes."""

    __slots__ = ("chunks", "joins", "put_off", "tokens")

    def __init__(
        self,
        joins: list[Account],
        put_off: list[Account],
        chunks: list[Chunk],
        tokens: int,
    ) -> None:
        self.joins = joins
        self.put_off = put_off
        self.chunks = chunks
        self.tokens = tokens
