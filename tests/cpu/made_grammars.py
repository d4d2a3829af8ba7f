"""Grammars over a vocabulary of 97 tokens, in plain Python, with the interface of real ones.

    lists   "[" (value ("," value)*)? "]"  where a value is a list or a run of digits; ends by itself
    digits  a run of digits; ends at an end token
    spaced  a digit, with up to 9 blanks before it: as long as the budget lets it
    nothing the empty text

Guides close in time, as the real ones do, and count their calls.
"""

import numpy as np

from quire.core.constraint import Constraint
from quire.core.snapshot import GrammarStats

END, OPEN, CLOSE, COMMA, BLANK, DIGITS = 2, 10, 11, 12, 13, range(20, 30)
VOCAB = 97


class Lists:
    def __init__(self):
        self.depth, self.place, self.begun = 0, "value", False

    def allowed(self):
        """Token -> fewest tokens that complete the text behind it."""
        if self.over:
            return {END: 0}
        if self.place in ("value", "first"):
            out = {OPEN: self.depth + 1}
            if self.begun:
                out |= dict.fromkeys(DIGITS, self.depth)
            if self.place == "first":
                out[CLOSE] = self.depth - 1
            return out
        out = {COMMA: 1 + self.depth, CLOSE: self.depth - 1}
        return out | (dict.fromkeys(DIGITS, self.depth) if self.place == "digits" else {})

    def take(self, token):
        self.begun = True
        if token == OPEN:
            self.depth, self.place = self.depth + 1, "first"
        elif token == CLOSE:
            self.depth, self.place = self.depth - 1, "after"
        elif token == COMMA:
            self.place = "value"
        elif token in DIGITS:
            self.place = "digits"

    @property
    def over(self):
        return self.begun and not self.depth


class Digits:
    def __init__(self):
        self.some = self.over = False

    def allowed(self):
        return {END: 0} if self.over else dict.fromkeys(DIGITS, 0) | ({END: 0} if self.some else {})

    def take(self, token):
        self.some, self.over = True, token == END


class Spaced:
    def __init__(self):
        self.blanks, self.over = 0, False

    def allowed(self):
        if self.over:
            return {END: 0}
        return dict.fromkeys(DIGITS, 0) | ({BLANK: 1} if self.blanks < 9 else {})

    def take(self, token):
        self.blanks += token == BLANK
        self.over = token != BLANK


class Nothing:
    over = True

    def allowed(self):
        return {END: 0}

    def take(self, token):
        pass


KINDS = {"lists": Lists, "digits": Digits, "spaced": Spaced, "nothing": Nothing}
LEAST = {"lists": 2, "digits": 1, "spaced": 1, "nothing": 0}


class Guide:
    """And its own matcher."""

    fault = None

    def __init__(self, kind):
        self._state = KINDS[kind]()
        self.forced = False
        self.taken = []
        self.matcher = self

    @property
    def is_terminated(self):
        return self._state.over

    def fill_bitmask(self, words):
        words[:] = bits(self._state.allowed(), len(words))

    def is_within_budget(self, left):
        return all(need < left for need in self._state.allowed().values())

    def apply_budget(self, words, left):
        assert left > 0, left
        allowed = self._state.allowed()
        kept = [t for t, need in allowed.items() if need < left]
        assert kept, f"{left} tokens are too few"
        assert (words == bits(allowed, len(words))).all(), "it was not filled"
        self.forced = self.forced or len(kept) < len(allowed)
        words[:] = bits(kept, len(words))

    def accept_replayed(self, token, left):
        needs = self._state.allowed().values()
        self.forced = self.forced or any(need >= left for need in needs)
        return self.accept(token)

    def accept(self, token):
        if token not in self._state.allowed():
            return False
        self._state.take(token)
        self.taken.append(token)
        return True


def bits(tokens, words):
    found = np.zeros(32 * words, bool)
    found[list(tokens)] = True
    return np.packbits(found, bitorder="little").view(np.int32)


def fill_all(matchers, words):
    for row, matcher in matchers:
        matcher.fill_bitmask(words[row])


class Ready:
    fill_all = staticmethod(fill_all)

    def __init__(self, grammars, kind):
        self._grammars, self._kind = grammars, kind

    def guide(self):
        made = Guide(self._kind)
        self._grammars.guides.append(made)
        return made


class Grammars:
    """Compiled at the request. `guides`: all that were made."""

    def __init__(self):
        self.guides = []
        self._news = []

    def check_constraint(self, constraint):
        assert constraint.form in KINDS

    def acquire(self, constraint):
        self._news.append(constraint)

    def release(self, constraint):
        pass

    @property
    def has_outcomes(self):
        return bool(self._news)

    def outcomes(self):
        news, self._news = self._news, []
        yield from ((constraint, LEAST[constraint.form]) for constraint in news)

    def set_outcome_callback(self, ring):
        pass

    def stats(self):
        return GrammarStats()

    def prepare(self):
        pass

    def close(self):
        pass

    def get(self, constraint):
        return Ready(self, constraint.form)


def bound_to(kind):
    return Constraint(kind)


def whole(kind, tokens):
    """Whether a text is complete: tokens without the end token."""
    state = KINDS[kind]()
    for token in tokens:
        if token not in state.allowed() or token == END:
            return False
        state.take(token)
    return state.over or END in state.allowed()
