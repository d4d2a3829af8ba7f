"""One sequence whose next token is not the model's alone to choose.

It is bound to a grammar, through a guide, or to a budget of thinking, or to both. The guide decides
what may come and when the text ends; min_tokens and the budget then narrow its masks, as far as
they leave something.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol, TypeVar

import numpy as np

from quire.core.constraint import Constraint
from quire.core.types import Sequence as Seq
from quire.grammar.base import Words
from quire.grammar.closing import FillAll, Guide
from quire.sampling.steps.thinking import Thought

log = logging.getLogger(__name__)

End = Literal["stop", "length"]
P = ParamSpec("P")
T = TypeVar("T")


class Ready(Protocol):
    """A grammar that was compiled."""

    @property
    def fill_all(self) -> FillAll:
        """Fills the masks of many of its matchers."""
        ...

    def guide(self) -> Guide:
        """A fresh one, for one sequence."""
        ...


class Grammars(Protocol):
    """Where grammars are; quire.grammar.pool."""

    def get(self, constraint: Constraint) -> Ready:
        """One that is known to be ready."""
        ...


@dataclass(slots=True, eq=False)
class Bound:
    """Compared by identity: one per stay in a slot."""

    guide: Guide | None
    fill_all: FillAll | None  # of the guide's matcher and its like
    thought: Thought | None
    most: int  # outputs at which it ends
    least: int  # outputs before which no token of `ends` may come
    ends: tuple[int, ...]
    ahead: bool = False  # its next output is taken in already
    over: bool = False  # it has ended: what is in flight for it means nothing
    fault: str | None = None  # why it must end
    refusal: str | None = None  # the same, where its request is to blame

    @classmethod
    def of(cls, seq: Seq, ready: Ready | None, tokens: list[int]) -> Bound:
        """tokens: prompt and outputs so far, all known."""
        asked, stop = seq.request.thinking, seq.request.stop
        made = cls(
            None if ready is None else ready.guide(),
            None if ready is None else ready.fill_all,
            None if asked is None else Thought.of(asked),
            most=seq.end - seq.prompt_len,
            least=0 if ready is None else stop.min_tokens,
            ends=tuple(sorted(stop.eos_ids | stop.token_ids)),
        )
        for outputs, token in enumerate(tokens[seq.prompt_len :]):
            made.accept(token, made.most - outputs)
        return made

    def wants(self, outputs: int) -> bool:
        """Whether the token behind so many outputs needs a mask, as far as is known."""
        if self.over:
            return False
        return self.guide is not None or (self.thought is not None and self.thought.due(outputs))

    def venture(self, token: int) -> bool:
        """Take in the next output before it is settled, if the grammar allows it."""
        self.ahead = self.guide is not None and self.guide.accept(token)
        return self.ahead

    def free(self, outputs: int) -> bool:
        """A grammar alone has a say behind so many outputs, and narrow() would change nothing."""
        guide = self.guide
        return (
            guide is not None
            and not self.over
            and self.thought is None
            and outputs >= self.least
            and guide.far(self.most - outputs)
        )

    def accept(self, token: int, left: int | None = None) -> End | None:
        """Take in the next output; how the text ends with it, if it does.

        left: how many might have come, of an output that another stay in a slot has drawn.
        """
        if self.thought is not None:
            self.thought.accept(token)
        guide = self.guide
        if guide is None:
            return None
        if left is not None:
            allowed = guide.recall(token, left)
        else:
            allowed = self.ahead or guide.accept(token)
            self.ahead = False
        if allowed and not guide.over:
            return None
        self.refusal = guide.matcher.fault  # what has one is over too
        if self.refusal is not None:
            return None
        if not allowed:
            self.fault = f"the grammar of the output does not allow token {token}"
            return None
        self.over = True
        return "length" if guide.forced else "stop"

    def guarded(self, what: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """What it gives; what it raises ends this sequence and no other."""
        try:
            return what(*args, **named)
        except Exception as error:
            log.exception("a grammar or a budget failed")
            self.fault = f"{type(error).__name__}: {error}"
            return None

    @property
    def failed(self) -> bool:
        """Whether it must end without a token."""
        return self.fault is not None or self.refusal is not None

    def narrow(self, words: Words, outputs: int) -> None:
        """Take from the matcher's mask what else may not come behind so many outputs."""
        if self.guide is not None:
            self.guide.narrow(words, self.most - outputs)
            self.refusal = self.guide.matcher.fault
        if outputs < self.least and self.ends:
            keep = words.copy()
            for token in self.ends:
                _bar(words, token)
            if not words.any():
                words[:] = keep
        forced = None if self.thought is None else self.thought.forced
        if forced is not None and _allows(words, forced):
            words[:] = 0
            words.view(np.uint32)[forced // 32] = 1 << forced % 32


def _bar(words: Words, token: int) -> None:
    if token < 32 * len(words):
        words.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)


def _allows(words: Words, token: int) -> bool:
    return token < 32 * len(words) and bool(words.view(np.uint32)[token // 32] >> token % 32 & 1)
