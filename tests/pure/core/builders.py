"""Builders of small requests, sequences and grammars for tests of the core."""

from __future__ import annotations

from collections import Counter

from quire.core.constraint import Constraint
from quire.core.drafters.base import HostDrafter
from quire.core.snapshot import GrammarStats
from quire.core.types import Request, Sequence, SequenceState, StopConditions
from quire.errors import RequestError


def request(id="r", prompt=(1, 2, 3), max_tokens=4, **fields):
    stop = fields.pop("stop", None) or StopConditions(max_tokens)
    return Request(id, tuple(prompt), stop, **fields)


def sequence(prompt=(1, 2, 3), *, tables=1, index=0, output=(), **fields):
    request_fields = {
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
    req = request(prompt=prompt, **request_fields)
    seq = Sequence(req, index, [*prompt, *output], tuple([] for _ in range(tables)))
    seq.max_len = len(prompt) + req.stop.max_tokens
    seq.stop_ids = req.stop.eos_ids | req.stop.token_ids
    seq.state = fields.pop("state", SequenceState.WAITING)
    for name, value in fields.items():
        setattr(seq, name, value)
    return seq


class FunctionDrafter(HostDrafter):
    """Proposes what function(sequence, its known tokens) returns."""

    def __init__(self, function):
        self.function = function

    def propose(self, seq, known, most):
        return tuple(self.function(seq, seq.tokens[:known]))[:most]

    def remove(self, seq):
        pass


def fake_constraint(ticks=1, least=1, *, fails=False):
    """Return a constraint that FakeGrammars compiles in so many ticks."""
    return Constraint(f"{ticks} {'fails' if fails else least}")


class FakeGrammars:
    """Compiles constraints of fake_constraint(); one that was compiled before is ready at once."""

    def __init__(self):
        self.held = Counter()
        self.compiling = {}  # constraint -> ticks left
        self.done = set()
        self.ready = []
        self.callback = lambda: None

    def check_constraint(self, constraint):
        pass

    def acquire(self, constraint):
        self.held[constraint] += 1
        if constraint in self.done:
            self.ready.append(constraint)
        else:
            self.compiling.setdefault(constraint, int(constraint.form.split()[0]))
            self.tick(0)

    def release(self, constraint):
        assert self.held[constraint] > 0, f"{constraint} was released once too often"
        self.held[constraint] -= 1
        if not self.held[constraint]:
            self.compiling.pop(constraint, None)

    def tick(self, ticks=1):
        for constraint, ticks_left in list(self.compiling.items()):
            self.compiling[constraint] = ticks_left - ticks
            if ticks_left <= ticks:
                del self.compiling[constraint]
                self.done.add(constraint)
                self.ready.append(constraint)
                self.callback()

    def outcomes(self):
        ready, self.ready = self.ready, []
        for constraint in ready:
            what = constraint.form.split()[1]
            yield constraint, RequestError("no") if what == "fails" else int(what)

    @property
    def has_outcomes(self):
        return bool(self.ready)

    def set_outcome_callback(self, callback):
        self.callback = callback

    def stats(self):
        return GrammarStats(waiting=len(self.compiling))
