"""Declaration of a reasoning format: modes, and the tags that lead from one mode to another.

    Mode.marks   {"</think>": Turn("content")}     at any place
    Mode.first   {"<think>": Turn("reasoning")}    only after nothing but white space

A format is data without code: quire.text.reasoning.parser parses all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from quire.text.output.special_strings import SpecialStrings

WHITESPACE = " \t\r\n"
MAX_HEADER_CHARS = 512
"""Characters of a header; what is longer is none."""


class ModeKind(Enum):
    """Kinds of text that a mode may have."""

    CONTENT = auto()
    REASONING = auto()
    HEADER = auto()
    """Neither: the complete text decides the next mode."""


@dataclass(frozen=True, slots=True)
class ModeTransition:
    """Into which mode a mark leads. A function gets the header that the mark completes."""

    target: str | Callable[[str], str]
    keep: Literal["", "before", "after"] = ""
    """The mark is markup; or the end of the text before it, or the beginning of that after it."""
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserMode:
    """A stretch of text of one kind."""

    kind: ModeKind
    transitions: Mapping[str, ModeTransition] = field(default_factory=dict)
    initial_transitions: Mapping[str, ModeTransition] = field(default_factory=dict)
    strip_leading: str = ""
    """Characters that are dropped at its beginning,"""
    strip_trailing: str = ""
    """and before the mark that ends it."""
    separator: str = ""
    """Stands between its text and earlier text of the same kind."""
    keep_header: bool = False
    """The header that led here is text too: a later reader understands it."""


@dataclass(frozen=True, slots=True)
class ChannelMarkup:
    """Markup of messages, where an answer is several of them."""

    reasoning: str
    """Begins one of thoughts,"""
    content: str
    """and one of content."""
    end: str
    """Ends one."""
    next_message: str
    """Begins another, up to its channel."""
    call: tuple[str, str] = ("", "")
    """Before and after the function's name at the beginning of a message of calls, where the
    markup of the calls does not begin the message."""


class ReasoningFormat:
    """Modes, compiled. Never changes.

    ends: (end of the prompt, mode in which the answer then begins); the first that fits counts.
    start: the mode where none fits. prefix: text that every answer begins with. plain: the mode
    of text that was taken for a header and is none. channels: if answers are several messages.
    """

    def __init__(
        self,
        modes: Mapping[str, ParserMode],
        start: str,
        ends: Sequence[tuple[str, str]] = (),
        *,
        prefix: str = "",
        plain: str = "start",
        channels: ChannelMarkup | None = None,
    ) -> None:
        self.reasoning_marks: tuple[tuple[str, str], ...] = ()
        """The marks before and after reasoning."""
        if channels is not None:
            self.reasoning_marks = ((channels.reasoning, channels.end),)
        self.fallback_mode = plain
        self.channels = channels
        self.modes = dict(modes)
        self.prompt_endings = tuple(ends)
        self.prefix = prefix
        self._start_mode = start
        self.markers = {name: SpecialStrings(mode.transitions) for name, mode in self.modes.items()}
        self.initial_markers = {
            name: SpecialStrings(mode.initial_transitions) for name, mode in self.modes.items()
        }

    def initial_mode(self, prompt: str, variables: Mapping[str, object]) -> str:
        """In which mode the answer to a prompt begins."""
        return self.mode_from_prompt(prompt) or self.default_mode(variables)

    def mode_from_prompt(self, prompt: str) -> str | None:
        """The mode at the end of a prompt; None: undetermined."""
        tail = prompt[-256:].rstrip(WHITESPACE)
        return next((mode for end, mode in self.prompt_endings if tail.endswith(end)), None)

    def default_mode(self, variables: Mapping[str, object]) -> str:
        """The mode if the prompt does not determine it."""
        return self._start_mode


class TaggedReasoning(ReasoningFormat):
    """Reasoning in tags, at the beginning of the answer.

    pairs: (opening, closing), or all that may close it. implied: the model reasons even where
    neither prompt nor answer opens; `switches` (names of template variables) turn it off, or on
    if default is False.
    breaks: marks that end reasoning too and belong to what follows. wraps: pairs around the
    content, taken away. anywhere: the marks are tokens that mean nothing else, so they count
    in the middle of content too. label: text after an opening mark that is no reasoning.
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
        label: str = "",
    ) -> None:
        self._implied = implied
        self._switches = tuple(switches)
        self._enabled_by_default = default
        opening = {opens: ModeTransition(f"reasoning {opens}") for opens, _ in pairs}
        wrapping = {opens: ModeTransition(f"inside {opens}") for opens, _ in wraps}
        closing = [mark for _, marks in pairs for mark in _as_tuple(marks)]
        everywhere = opening if anywhere else {}
        first = opening | wrapping
        stray = {mark: _stray_closing(mark) for mark in closing}
        modes = {
            f"reasoning {opens}": _reasoning_tag_mode(opens, _as_tuple(c), breaks, label)
            for opens, c in pairs
        }
        modes |= {f"inside {opens}": _wrapper_mode(closes) for opens, closes in wraps}
        modes["start"] = ParserMode(
            kind=ModeKind.CONTENT, transitions=everywhere | stray, initial_transitions=first
        )
        modes["content"] = ParserMode(
            kind=ModeKind.CONTENT,
            transitions=everywhere,
            initial_transitions=first,
            strip_leading="\r\n",
        )
        modes["rest"] = ParserMode(
            kind=ModeKind.CONTENT, transitions=everywhere, strip_leading="\r\n"
        )
        modes["plain"] = ParserMode(kind=ModeKind.CONTENT, transitions=everywhere)
        ends = [(opens + label.rstrip(), str(turn.target)) for opens, turn in first.items()]
        ends += [(opens, str(turn.target)) for opens, turn in first.items() if label]
        super().__init__(modes, "start", ends + [(mark, "content") for mark in closing])
        self.reasoning_marks = tuple(
            (start, end)
            for opens, closes in pairs
            for start in dict.fromkeys((opens, opens + label))
            for end in _as_tuple(closes)
        )
        self._reasoning_mode = f"reasoning {pairs[0][0]}"

    def default_mode(self, variables: Mapping[str, object]) -> str:
        values = [variables[name] for name in self._switches if variables.get(name) is not None]
        reasons = any(values) if values else self._enabled_by_default
        return self._reasoning_mode if self._implied and reasons else "start"


def _stray_closing(mark: str) -> ModeTransition:
    return ModeTransition(
        "plain", "before", f"{mark} closes what nothing opened; it is left in the text"
    )


def _reasoning_tag_mode(
    opens: str, closes: Sequence[str], breaks: Sequence[str], label: str
) -> ParserMode:
    marks = {mark: ModeTransition("content") for mark in closes}
    return ParserMode(
        kind=ModeKind.REASONING,
        transitions=marks | {mark: ModeTransition("content", "after") for mark in breaks},
        initial_transitions={
            mark: ModeTransition(f"reasoning {opens}") for mark in (opens, label) if mark
        },
        strip_leading=WHITESPACE,
        strip_trailing=WHITESPACE,
        separator="\n",
    )


def _wrapper_mode(closes: str) -> ParserMode:
    return ParserMode(
        kind=ModeKind.CONTENT,
        transitions={closes: ModeTransition("rest")},
        strip_leading="\r\n",
        strip_trailing="\r\n",
    )


def _as_tuple(marks: str | tuple[str, ...]) -> tuple[str, ...]:
    return (marks,) if isinstance(marks, str) else marks


def never_detected(template: str) -> bool:
    """`detect` of a second name of a format: only the first is detected."""
    return False
