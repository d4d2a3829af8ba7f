"""Small real objects for tests of the core."""

from __future__ import annotations

from collections import Counter

from quire.core.constraint import Constraint
from quire.core.snapshot import GrammarStats
from quire.core.types import Request, Sequence, SequenceState, StopConditions
from quire.errors import RequestError


def request(id="r", prompt=(1, 2, 3), max_tokens=4, **fields):
    stop = fields.pop("stop", None) or StopConditions(max_tokens)
    return Request(id, tuple(prompt), stop, **fields)


def sequence(prompt=(1, 2, 3), *, tables=1, index=0, output=(), **fields):
    asked = {
        k: fields.pop(k)
        for k in (
            "id",
            "salt",
            "priority",
            "arrived_at",
            "read_prefix_cache",
            "stop",
            "tenant",
            "extra_content",
        )
        if k in fields
    }
    made = request(prompt=prompt, **asked)
    seq = Sequence(made, index, [*prompt, *output], tuple([] for _ in range(tables)))
    seq.max_len = len(prompt) + made.stop.max_tokens
    seq.stop_ids = made.stop.eos_ids | made.stop.token_ids
    seq.state = fields.pop("state", SequenceState.WAITING)
    for name, value in fields.items():
        setattr(seq, name, value)
    return seq


def bound(ticks=1, least=1, *, fails=False):
    """A constraint that FakeGrammars compiles in so many ticks."""
    return Constraint(f"{ticks} {'fails' if fails else least}")


class FakeGrammars:
    """Compiles what bound() makes; what is asked for once more is ready at once."""

    def __init__(self):
        self.held = Counter()
        self.compiling = {}  # constraint -> ticks left
        self.done = set()
        self.news = []
        self.ring = lambda: None

    def check_constraint(self, constraint):
        pass

    def acquire(self, constraint):
        self.held[constraint] += 1
        if constraint in self.done:
            self.news.append(constraint)
        else:
            self.compiling.setdefault(constraint, int(constraint.form.split()[0]))
            self.tick(0)

    def release(self, constraint):
        assert self.held[constraint] > 0, f"{constraint} was released once too often"
        self.held[constraint] -= 1
        if not self.held[constraint]:
            self.compiling.pop(constraint, None)

    def tick(self, ticks=1):
        for constraint, left in list(self.compiling.items()):
            self.compiling[constraint] = left - ticks
            if left <= ticks:
                del self.compiling[constraint]
                self.done.add(constraint)
                self.news.append(constraint)
                self.ring()

    def outcomes(self):
        news, self.news = self.news, []
        for constraint in news:
            what = constraint.form.split()[1]
            yield constraint, RequestError("no") if what == "fails" else int(what)

    @property
    def has_outcomes(self):
        return bool(self.news)

    def set_outcome_callback(self, ring):
        self.ring = ring

    def stats(self):
        return GrammarStats(waiting=len(self.compiling))
