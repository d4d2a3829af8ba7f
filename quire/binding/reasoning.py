"""Forms behind reasoning: what an answer is bound to begins where its thoughts end.

    the prompt ends in <think>     thoughts </think> form
    it says nothing of it          form, or <think> thoughts </think> form
    it ends in </think>            form

Not here: what marks mean (quire.text.reasoning), how long thoughts may be (quire.sampling).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quire.binding.calls import begins_with, without
from quire.core.types import Thinking
from quire.grammar.forms import Either, Form, Regex, Repeat, Seq, Tag, Tags, Text, Until
from quire.text.reasoning.base import Channels, Dialect, Kind, Mode, Turn
from quire.text.reasoning.machine import Machine

ANY_TEXT = Regex(r"[\s\S]*")
_BREAK = Regex(r"\n{0,2}")
"""Between thoughts and what follows; readers drop it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What an answer without reasoning must be: content of this form, or calls of that one."""

    content: Form | None = None
    calls: Form | None = None
    is_free: bool = False
    """Calls stand in text that is free."""

    def form(self) -> Form:
        """Either."""
        return _either([one for one in (self.content, self.calls) if one is not None])


def behind(
    bound: Bound,
    dialect: Dialect,
    prompt: str = "",
    variables: Mapping[str, object] | None = None,
    *,
    begun: str = "",
) -> Form:
    """The whole answer to this prompt. begun: the text of the message that it goes on with."""
    mode = Machine(dialect, prompt, variables, begun=begun).mode
    if dialect.channels is not None:
        return _messages(bound, dialect.channels, mode, goes_on=bool(begun))
    if dialect.prefix:
        return Seq((Until("</" + dialect.prefix.removeprefix("<")), _BREAK, bound.form()))
    if mode.kind is Kind.REASONING:
        return _thought(bound, dialect, mode)
    if begun or mode is dialect.modes.get(dialect.said(prompt) or ""):
        return _either([_closed(bound, mode)])
    ways = [_open(bound, dialect, mode)]
    for mark, turn in {**mode.first, **mode.marks}.items():
        inner = _mode(dialect, turn)
        if inner is not None and inner.kind is Kind.REASONING:
            ways.append(Seq((Text(mark), _thought(bound, dialect, inner))))
    return _either(ways)


def _mode(dialect: Dialect, turn: Turn) -> Mode | None:
    return dialect.modes[turn.into] if isinstance(turn.into, str) else None


def _thought(bound: Bound, dialect: Dialect, mode: Mode) -> Form:
    """The rest of a thought, and what follows it."""
    ways = {mark: _after(bound, dialect, mark, turn) for mark, turn in mode.marks.items()}
    if len(ways) == 1:
        ((mark, way),) = ways.items()
        assert way is not None, f"nothing may follow {mark}"
        return Seq((Until(mark), way))
    tags = [Tag(mark, way, "") for mark, way in ways.items() if way is not None]
    return Tags(tuple(ways), tuple(tags), least=1, only_first=True)


def _after(bound: Bound, dialect: Dialect, mark: str, turn: Turn) -> Form | None:
    """What may follow a mark that ends a thought; None: it may not stand there."""
    into = _mode(dialect, turn)
    if turn.keep != "after":
        return _open(bound, dialect, into, spaced=True)
    calls = bound.calls
    return without(calls, mark) if calls is not None and begins_with(calls, mark) else None


def _open(bound: Bound, dialect: Dialect, mode: Mode | None, *, spaced: bool = False) -> Form:
    """What is bound, its content with or without the marks that a model puts around it."""
    lead = (_BREAK,) if spaced else ()
    ways: list[Form] = [Seq((*lead, bound.form())) if spaced else bound.form()]
    if bound.content is not None and mode is not None:
        for mark, turn in mode.first.items():
            inner = _mode(dialect, turn)
            if inner is not None and inner.kind is Kind.CONTENT:
                ways.append(Seq((*lead, Text(mark), _wrapped(bound.content, inner))))
    return _either(ways)


def _wrapped(content: Form, mode: Mode) -> Form:
    """Content up to the mark that closes what was opened around it."""
    return Seq((_BREAK, content, _BREAK, _either([Text(mark) for mark in mode.marks])))


def _closed(bound: Bound, mode: Mode) -> Form:
    """Where the prompt said that no thought comes. It may have opened marks around the content."""
    wraps = [mark for mark, turn in mode.marks.items() if turn.into == "rest"]
    if bound.content is None or not wraps:
        return bound.form()
    end = Repeat(Seq((_BREAK, _either([Text(mark) for mark in wraps]))), least=0, most=1)
    content = Seq((bound.content, end))
    return content if bound.calls is None else Either((content, bound.calls))


def _messages(bound: Bound, how: Channels, mode: Mode, *, goes_on: bool) -> Form:
    """An answer of several messages: thoughts, then one of content or calls."""
    content = None
    if bound.content is not None:
        content = Seq((Text(how.content), bound.content))
    last = Bound(content, bound.calls).form()
    thought = Seq((Text(how.thought), Until(how.end), Text(how.next)))
    answer = Seq((Repeat(thought, least=0), last))
    if mode.kind is Kind.REASONING:
        return Seq((Until(how.end), Text(how.next), answer))
    if goes_on and bound.content is not None:
        return bound.content
    return answer


def _either(parts: Sequence[Form]) -> Form:
    return parts[0] if len(parts) == 1 else Either(tuple(parts))


# -- how long -------------------------------------------------------------------------------------


def thinking(
    budget: int,
    dialect: Dialect,
    encode: Callable[[str], Sequence[int]],
    prompt: str = "",
    variables: Mapping[str, object] | None = None,
    *,
    begun: str = "",
) -> Thinking | None:
    """The budget in tokens of this model. None: the dialect tells no thoughts apart."""
    mode = Machine(dialect, prompt, variables, begun=begun).mode
    if dialect.channels is not None:
        begin, end = dialect.channels.thought, dialect.channels.end
    elif dialect.prefix:
        begin, end = dialect.prefix, "</" + dialect.prefix.removeprefix("<")
        return Thinking(budget, tuple(encode(end)), None)
    elif mode.kind is Kind.REASONING:
        begin, end = "", _end(mode)
    else:
        pairs = list(_pairs(dialect, mode))
        if not pairs:
            return None
        begin, end = min(pairs, key=lambda pair: len(encode(pair[0])))
    within = mode.kind is Kind.REASONING
    return Thinking(budget, tuple(encode(end)), None if within else tuple(encode(begin)))


def _pairs(dialect: Dialect, mode: Mode) -> list[tuple[str, str]]:
    found = []
    for mark, turn in {**mode.first, **mode.marks}.items():
        inner = _mode(dialect, turn)
        if inner is not None and inner.kind is Kind.REASONING:
            found.append((mark, _end(inner)))
    return found


def _end(mode: Mode) -> str:
    """The mark that ends a thought."""
    return next(mark for mark, turn in mode.marks.items() if turn.keep != "after")
