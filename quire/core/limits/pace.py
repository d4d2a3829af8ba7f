"""Prompts leave room for those who decode: a step of both takes no longer than a target.

There are two targets. A short prompt is over in a few steps, and each may take target_s; or longer,
where a step of decoding rows alone takes so long that less would starve prompts. A long prompt
takes hundreds of steps, and what it adds to each is what people wait for at every token: such a
step may take less than twice a bare one, so nobody's tokens come at less than half their pace. What
a bare step takes is measured; while there are prompts all the time, one step in fifty goes without.

How many prompt tokens that are is learnt from each step that landed: so many more or fewer as it
was quicker or slower than the target. A step has fixed costs, so this errs on the small side and
comes nearer with each step; it needs no model of the device, and forgets a stall in a few steps.
Where nobody decodes, prompts get all there is: nobody waits for a token then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quire.core.limits.base import NO_BOUND, Limit
from quire.core.types import Sequence, State

LEAST = 64
"""Prompt tokens a step may always have, whatever the target: prompts must get on too."""
FIRST = 256
"""Prompt tokens of the first step beside decoding rows, when nothing is known yet."""
LEAST_OF_LONG = 32
"""The same of long prompts. Fewer save next to nothing: a step reads all of the context anyway."""
FULL = 0.4
"""Of what is allowed, so much makes a step full: rounding may take more than half."""
TWICE = 1.9
"""Bare steps that one with a long prompt may take; what varies comes on top."""
LONG = 8
"""A prompt is long that would take more than so many full steps."""
LOOK_EVERY = 50
"""After so many steps with prompts one goes without, to see what a bare one takes."""
DEPTH = 8
"""So many plans are remembered: more than are in flight."""


@dataclass(slots=True)
class _Fit:
    """How many prompt tokens a step may have to take no longer than a target."""

    least: int
    most: float = float(NO_BOUND)

    def learn(self, prompt_tokens: int, seconds: float, target_s: float) -> None:
        fits = max(prompt_tokens * target_s / seconds, self.least)
        unknown = self.most >= NO_BOUND
        if unknown or fits < prompt_tokens or prompt_tokens >= FULL * self.most:
            self.most = fits
        else:
            self.most = max(self.most, fits)


@dataclass(slots=True)
class _Plan:
    """Tokens of prompts in a step, and those of long ones among them."""

    tokens: int = 0
    longs: int = 0


class Pace(Limit):
    """left = what the target allows - prompt tokens taken in this step, if somebody decodes.

    left_of_long: the same of the lower target; long ones count for both.
    """

    def __init__(self, target_s: float, *, least_of_long: int = LEAST_OF_LONG) -> None:
        assert target_s > 0, target_s
        self.target_s = target_s
        self.bare_s = 0.0  # what a step of decoding rows alone takes; 0: not known
        self.short = _Fit(LEAST)
        self.long = _Fit(least_of_long)
        self.left = NO_BOUND
        self.left_of_long = NO_BOUND
        self.longs = 0  # rows of long prompts in this step
        self.plans: deque[_Plan] = deque(maxlen=DEPTH)  # the latest last
        self.unseen = 0  # steps with prompts since a bare one
        self.decoding = 0  # rows of this step
        self.decoded = 0  # rows of the step before: those of this one may come late in it

    def begin(self, sequences: int) -> None:
        self.decoded, self.decoding = self.decoding, 0
        self.longs = 0
        self.plans.append(_Plan())
        self.left = self._room(self.short)
        self.left_of_long = min(self._room(self.long), self.left)
        if self._looks:
            self.left = self.left_of_long = 0

    def allow(self, seq: Sequence, want: int) -> int:
        if _decodes(seq) or not self._binds:
            return want
        left = self.left
        if self._is_long(seq):
            left = self.left_of_long
            if self.left > 0 and not self.longs:
                left = max(left, self.long.least)  # shorter ones took all, step after step
        return max(0, min(want, left))

    def room(self) -> int:
        """Tokens of prompts that this step still has."""
        return max(self.left, 0) if self._binds else NO_BOUND

    def take(self, seq: Sequence, n: int) -> None:
        self._count(seq, n, 1)

    def undo(self, seq: Sequence, n: int) -> None:
        self._count(seq, n, -1)

    def slack(self) -> int:
        return NO_BOUND

    def take_ones(self, rows: int) -> None:
        self.decoding += rows

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        if not prompt_tokens:
            self._see_bare(seconds)
            return
        self.unseen += 1
        long_tokens = self._long_tokens(prompt_tokens)
        if not long_tokens and prompt_tokens >= LEAST:
            self.short.learn(prompt_tokens, seconds, self._target_s)
        elif long_tokens == prompt_tokens and self.bare_s:
            self.long.learn(prompt_tokens, seconds, TWICE * self.bare_s)

    @property
    def _target_s(self) -> float:
        """Of short prompts."""
        return max(self.target_s, TWICE * self.bare_s)

    @property
    def _looks(self) -> bool:
        """This step shall be a bare one, to see what that takes."""
        unknown = not self.bare_s and any(plan.longs for plan in self.plans)
        return self.decoded > 0 and (unknown or self.unseen >= LOOK_EVERY)

    @property
    def _binds(self) -> bool:
        return bool(self.decoding or self.decoded)

    def _room(self, fit: _Fit) -> int:
        if self.short.most >= NO_BOUND:
            return FIRST
        most = fit.most
        if most >= NO_BOUND:  # of no long prompt yet; half of what the shorter ones promise
            most = self.short.most * TWICE * self.bare_s / self._target_s / 2
        return max(fit.least, _even(int(most) + self.decoded) - self.decoded)

    def _count(self, seq: Sequence, n: int, sign: int) -> None:
        if _decodes(seq):
            self.decoding += sign
            return
        self.left -= sign * n
        self.left_of_long -= sign * n
        is_long = self._is_long(seq)
        self.longs += sign * is_long
        if self.plans:
            self.plans[-1].tokens += sign * n
            self.plans[-1].longs += sign * n * is_long

    def _long_tokens(self, prompt_tokens: int) -> int:
        """Of a step that landed, those of long prompts. Plans land in order; some never do."""
        for place, plan in enumerate(self.plans):
            if plan.tokens == prompt_tokens:
                for _ in range(place + 1):
                    self.plans.popleft()
                return plan.longs
        return 0

    def _is_long(self, seq: Sequence) -> bool:
        """Whether its prompt, without what was cached, takes many steps: also towards its end."""
        tokens = seq.pending
        if seq.state is State.RUNNING:
            tokens = max(tokens, seq.prompt_len - seq.cached)
        return tokens > LONG * self.short.most

    def _see_bare(self, seconds: float) -> None:
        """A step without prompts landed. One slow one is no rule."""
        self.unseen = 0
        if not self.bare_s:
            self.bare_s = seconds
        self.bare_s += (min(seconds, 2 * self.bare_s) - self.bare_s) / 8


def _decodes(seq: Sequence) -> bool:
    """Whether the row is of a next token, not of a prompt or of what was preempted."""
    return seq.pending == 1 and seq.planned >= seq.prompt_len


def _even(tokens: int) -> int:
    """So many or somewhat fewer: matrix products work in tiles, and pay for the last ones in full.

    Not by much: a step that got a third less would not show that the third had fitted.
    """
    grain = 256 if tokens >= 1024 else 128 if tokens >= 512 else 1
    return tokens - tokens % grain
