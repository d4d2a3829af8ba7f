"""What a dialect of reasoning is: modes, and the marks that lead from one into another.

    Mode.marks   {"</think>": Turn("content")}     wherever the mark stands
    Mode.first   {"<think>": Turn("reasoning")}    only where nothing but white space came before it

A dialect says nothing of how a text is cut: quire.text.reasoning.machine reads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from quire.text.marks import Marks

WHITE = " \t\r\n"
LONGEST_HEADER = 512
"""Characters of a header; what is longer is none."""


class Kind(Enum):
    """What the text of a mode is."""

    CONTENT = auto()
    REASONING = auto()
    HEADER = auto()
    """Neither: its text, when it is complete, says what comes next."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Into which mode a mark leads. A function gets the header that the mark completes."""

    into: str | Callable[[str], str]
    keep: Literal["", "before", "after"] = ""
    """The mark is markup; or the end of the text before it, or the beginning of that after it."""
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A stretch of text of one kind."""

    kind: Kind
    marks: Mapping[str, Turn] = field(default_factory=dict)
    first: Mapping[str, Turn] = field(default_factory=dict)
    lead: str = ""
    """Characters that are dropped at its beginning,"""
    tail: str = ""
    """and before the mark that ends it."""
    joint: str = ""
    """Stands between its text and earlier text of the same kind."""
    verbatim: bool = False
    """The header that led here is text too: a later reader understands it."""


@dataclass(frozen=True, slots=True)
class Channels:
    """How messages are written, where an answer is several of them."""

    thought: str
    """Begins one of thoughts,"""
    content: str
    """and one of content."""
    end: str
    """Ends one."""
    next: str
    """Begins another, up to its channel."""


class Dialect:
    """Modes, compiled. Never changes.

    ends: (end of the prompt, mode in which the answer then begins); the first that fits counts.
    start: the mode where none fits. prefix: text that every answer begins with. plain: the mode
    of text that was taken for a header and is none. channels: if answers are several messages.
    """

    def __init__(
        self,
        modes: Mapping[str, Mode],
        start: str,
        ends: Sequence[tuple[str, str]] = (),
        *,
        prefix: str = "",
        plain: str = "start",
        channels: Channels | None = None,
    ) -> None:
        self.plain = plain
        self.channels = channels
        self.modes = dict(modes)
        self.ends = tuple(ends)
        self.prefix = prefix
        self._start = start
        self.marks = {name: Marks(mode.marks) for name, mode in self.modes.items()}
        self.first = {name: Marks(mode.first) for name, mode in self.modes.items()}

    def start(self, prompt: str, variables: Mapping[str, object]) -> str:
        """In which mode the answer to a prompt begins."""
        return self.said(prompt) or self.unsaid(variables)

    def said(self, prompt: str) -> str | None:
        """The mode that the end of a prompt leads into; None: it does not say."""
        tail = prompt[-256:].rstrip(WHITE)
        return next((mode for end, mode in self.ends if tail.endswith(end)), None)

    def unsaid(self, variables: Mapping[str, object]) -> str:
        """The mode where the prompt does not say it."""
        return self._start


class Tags(Dialect):
    """Reasoning in tags, at the beginning of the answer.

    pairs: (opening, closing), or all that may close it. implied: the model reasons even where
    neither prompt nor answer opens; `switches` (names of template variables) turn it off, or on
    if default is False.
    breaks: marks that end reasoning too and belong to what follows. wraps: pairs around the
    content, taken away. anywhere: the marks are tokens that mean nothing else, so they count
    in the middle of content too.
    """

    def __init__(
        self,
        *pairs: tuple[str, str | tuple[str, ...]],
        implied: bool = False,
        switches: Sequence[str] = (),
        default: bool = True,
        breaks: Sequence[str] = (),
        wraps: Sequence[tuple[str, str]] = (),
        anywhere: bool = False,
    ) -> None:
        self._implied = implied
        self._switches = tuple(switches)
        self._default = default
        opening = {opens: Turn(f"reasoning {opens}") for opens, _ in pairs}
        wrapping = {opens: Turn(f"inside {opens}") for opens, _ in wraps}
        closing = [mark for _, marks in pairs for mark in _each(marks)]
        everywhere = opening if anywhere else {}
        first = opening | wrapping
        stray = {mark: _stray(mark) for mark in closing}
        modes = {f"reasoning {opens}": _thought(opens, _each(c), breaks) for opens, c in pairs}
        modes |= {f"inside {opens}": _wrapped(closes) for opens, closes in wraps}
        modes["start"] = Mode(kind=Kind.CONTENT, marks=everywhere | stray, first=first)
        modes["content"] = Mode(kind=Kind.CONTENT, marks=everywhere, first=first, lead="\r\n")
        modes["rest"] = Mode(kind=Kind.CONTENT, marks=everywhere, lead="\r\n")
        modes["plain"] = Mode(kind=Kind.CONTENT, marks=everywhere)
        ends = [(opens, str(turn.into)) for opens, turn in first.items()]
        super().__init__(modes, "start", ends + [(mark, "content") for mark in closing])
        self._thought = f"reasoning {pairs[0][0]}"

    def unsaid(self, variables: Mapping[str, object]) -> str:
        said = [variables[name] for name in self._switches if variables.get(name) is not None]
        thinks = any(said) if said else self._default
        return self._thought if self._implied and thinks else "start"


def _stray(mark: str) -> Turn:
    return Turn("plain", "before", f"{mark} closes what nothing opened; it is left in the text")


def _thought(opens: str, closes: Sequence[str], breaks: Sequence[str]) -> Mode:
    marks = {mark: Turn("content") for mark in closes}
    return Mode(
        kind=Kind.REASONING,
        marks=marks | {mark: Turn("content", "after") for mark in breaks},
        first={opens: Turn(f"reasoning {opens}")},
        lead=WHITE,
        tail=WHITE,
        joint="\n",
    )


def _wrapped(closes: str) -> Mode:
    return Mode(kind=Kind.CONTENT, marks={closes: Turn("rest")}, lead="\r\n", tail="\r\n")


def _each(marks: str | tuple[str, ...]) -> tuple[str, ...]:
    return (marks,) if isinstance(marks, str) else marks


def never(template: str) -> bool:
    """`detect` of a second name of a dialect: the first is the one to be found."""
    return False
