"""Separates reasoning from content, for every format and however the text is cut.

A format declares the tags. A tool call ends reasoning too, in formats that do not say so. State:
the mode, and two parts that are held back. `_pending`: the end of the text, which may be the
beginning of a tag. `_pending_space`: white space, which belongs to the text or not, depending on
the text after it. Each character is visited a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from quire.text.output.parsed_text import ParsedPiece, merge_pieces
from quire.text.output.special_strings import SpecialStrings
from quire.text.reasoning.base import (
    MAX_HEADER_CHARS,
    WHITESPACE,
    ModeKind,
    ModeTransition,
    ParserMode,
    ReasoningFormat,
)

_match_space = re.compile(f"[{WHITESPACE}]*").match
MAX_OPENER_SPACE = 16
"""Whitespace characters between the opening literal of a call and what follows it."""
FORCE_CONTENT = "force_nonempty_content"
"""The template variable of clients that want text as content where reasoning is not closed."""


class ReasoningParser:
    """Parses one answer, from the mode in which its prompt ends.

    continued_text: the text of a message in the prompt that the answer continues. openers: literals
    that begin a tool call, each with the literals of which one must follow for it to end reasoning.
    spans: [start, end) of stretches of reasoning in the text, None while it is open; they are
    certain up to `settled_chars`.
    """

    def __init__(
        self,
        reasoning_format: ReasoningFormat,
        prompt: str = "",
        variables: Mapping[str, object] | None = None,
        *,
        continued_text: str = "",
        openers: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        self._openers = openers
        self._held_reasoning: list[str] | None = None  # with FORCE_CONTENT, until its end
        if variables and variables.get(FORCE_CONTENT):
            self._held_reasoning = []
        self.spans: list[tuple[int, int | None]] = []
        self.settled_chars = 0  # where in the whole text what is held begins
        self._format = reasoning_format
        self._out: list[ParsedPiece] = []
        self._emitted_kinds: set[ModeKind] = set()
        self._pending_space: list[str] = []
        self._header = ""
        self._pending = ""
        self._at_mode_start = True  # only white space so far in this mode
        self._prefix = reasoning_format.prefix
        prompt, continued_text = prompt.rstrip(WHITESPACE), continued_text.strip(WHITESPACE)
        continues = bool(continued_text) and prompt.endswith(continued_text)
        before = prompt[: len(prompt) - len(continued_text)] if continues else prompt
        self._enter(reasoning_format.initial_mode(before, variables or {}), 0)
        if continues:
            self._resume(continued_text)

    def _resume(self, continued_text: str) -> None:
        """Advance to the state after this text, without output."""
        self._prefix = ""
        self.push(continued_text, last=False)
        if self._mode.kind is ModeKind.HEADER:
            self._enter(self._format.fallback_mode, 0)
        self._pending, self._separator, self.settled_chars = "", "", 0
        self._pending_space.clear()
        self._emitted_kinds.clear()
        self.spans = [(0, None)] if self._mode.kind is ModeKind.REASONING else []

    @property
    def mode(self) -> ParserMode:
        """The current mode, in which the next text is parsed."""
        return self._mode

    def push(self, text: str, *, last: bool) -> list[ParsedPiece]:
        """See StreamingParser."""
        if self._prefix and (text or last):
            self._out.append(ParsedPiece(self._prefix))
            self._prefix = ""
        data = self._pending + text
        at: int | None = 0
        while at is not None:
            at = self._step(data, at, last)
        if last:
            self._finish()
        out, self._out = self._out, []
        return merge_pieces(out)

    def _step(self, data: str, at: int, last: bool) -> int | None:
        """Read from data[at:] past the next mark; None: all is read but for what is held."""
        mode = self._mode
        if self._at_mode_start and (mode.initial_transitions or mode.strip_leading):
            at = self._skip_space(data, at)
            mark = self._initial_markers.match_at(data, at)
            if mark is not None:
                return self._transition(mode.initial_transitions[mark], mark, at)
            if not last and self._initial_markers.partial_match_start(data, at) == at:
                self._hold(data, at)
                return None
        if mode.kind is ModeKind.HEADER:
            return self._read_header(data, at, last)
        found = self._markers.find(data, at)
        if found is not None:
            mark, place = found
            turn = mode.transitions.get(mark)
            if turn is None:
                return self._read_opener(data, at, mark, place, last)
            self._read_text(data[at:place])
            return self._transition(turn, mark, place)
        end = len(data) if last else self._markers.partial_match_start(data, at)
        self._read_text(data[at:end])
        self._hold(data, end)
        return None

    def _read_opener(self, data: str, at: int, mark: str, place: int, last: bool) -> int | None:
        """A literal in reasoning that may begin a call: decided by the text after it."""
        after = place + len(mark)
        space = _match_space(data, after, after + MAX_OPENER_SPACE)
        rest = data[space.end() if space is not None else after :]
        if rest.startswith(self._openers[mark]):
            self._read_text(data[at:place])
            return self._transition(_CALL_BEGINS, mark, place)
        if not last and any(one.startswith(rest) for one in self._openers[mark]):
            self._read_text(data[at:place])
            self._hold(data, place)
            return None
        self._read_text(data[at:after])
        return after

    def _read_header(self, data: str, at: int, last: bool) -> int | None:
        """Gather a header, and turn where it is complete."""
        most = at + MAX_HEADER_CHARS - len(self._header)
        found = self._markers.find(data, at, most + 1)
        end = (
            found[1]
            if found
            else len(data)
            if last
            else self._markers.partial_match_start(data, at)
        )
        self._header += data[at : min(end, most)]
        if end > most:
            self._reject_header(
                "a header without end; it is left in the text", self.settled_chars + most
            )
            return most
        if found is None:
            self._hold(data, end)
            return None
        mark, place = found
        turn = self._mode.transitions[mark]
        if not isinstance(turn.target, str):
            return self._transition(turn, mark, place)
        self._reject_header(
            f"a header that ends in {mark}; it is left in the text", self.settled_chars + place
        )
        return place + len(mark)

    def _skip_space(self, data: str, at: int) -> int:
        """Past white space at the beginning of a mode."""
        found = _match_space(data, at)
        end = found.end() if found is not None else at
        if end > at:
            self._pending_space.append(data[at:end])
        return end

    def _hold(self, data: str, end: int) -> None:
        self._pending = data[end:]
        self.settled_chars += end

    # -- text ---------------------------------------------------------------------------------

    def _read_text(self, text: str) -> None:
        """Text of the mode. What may have to be dropped before a mark waits in _space."""
        tail = self._mode.strip_trailing
        kept = text.rstrip(tail) if tail else text
        if kept:
            self._flush_space()
            self._emit(kept)
        if len(kept) < len(text):
            self._pending_space.append(text[len(kept) :])

    def _flush_space(self) -> None:
        """White space that was held back is text after all."""
        space = "".join(self._pending_space)
        self._pending_space.clear()
        if self._at_mode_start:
            self._at_mode_start = False
            space = space.lstrip(self._mode.strip_leading) if self._mode.strip_leading else space
        if space:
            self._emit(space)

    def _emit(self, text: str) -> None:
        text, self._separator = self._separator + text, ""
        if not self._mode.keep_header:
            self._emitted_kinds.add(self._mode.kind)
        if self._mode.kind is not ModeKind.REASONING:
            self._out.append(ParsedPiece(text))
        elif self._held_reasoning is None:
            self._out.append(ParsedPiece(reasoning=text))
        else:
            self._held_reasoning.append(text)

    def _finish(self) -> None:
        if self._mode.kind is ModeKind.HEADER:
            self._reject_header(
                "the text ends in a header; it is left in the text", self.settled_chars
            )
        elif not self._mode.strip_trailing:
            self._flush_space()
        if self._held_reasoning:
            self._out.append(ParsedPiece("".join(self._held_reasoning).lstrip("\n")))

    # -- from mode to mode --------------------------------------------------------------------

    def _transition(self, turn: ModeTransition, mark: str, place: int) -> int:
        """Enter the next mode. Returns the position in the data to continue at."""
        if turn.keep == "before":
            self._flush_space()
            self._emit(mark)
        if turn.note:
            self._out.append(ParsedPiece(note=turn.note))
        self._leave(self.settled_chars + place)
        after = place if turn.keep == "after" else place + len(mark)
        if isinstance(turn.target, str):
            self._enter(turn.target, self.settled_chars + after)
            return after
        header = self._header
        self._enter(turn.target(header), self.settled_chars + after)
        if self._mode.keep_header:
            self._at_mode_start = False
            self._emit(header + mark)
        return after

    def _leave(self, place: int) -> None:
        if self._mode.kind is ModeKind.REASONING:
            self.spans[-1] = (self.spans[-1][0], place)
            if self._held_reasoning:
                self._out.append(ParsedPiece(reasoning="".join(self._held_reasoning)))
                self._held_reasoning.clear()

    def _enter(self, name: str, place: int) -> None:
        """place: where in the whole text the mode begins."""
        self._mode = mode = self._format.modes[name]
        self._markers = self._format.markers[name]
        if self._openers and mode.kind is ModeKind.REASONING and self._format.channels is None:
            self._markers = _markers_with_openers(self._markers, tuple(self._openers))
        self._initial_markers = self._format.initial_markers[name]
        self._at_mode_start = True
        self._pending_space.clear()
        self._separator = mode.separator if mode.kind in self._emitted_kinds else ""
        if mode.kind is ModeKind.HEADER:
            self._header = ""
        if mode.kind is ModeKind.REASONING:
            self.spans.append((place, None))

    def _reject_header(self, note: str, place: int) -> None:
        """Emit the text that was taken for a header."""
        header = self._header
        self._enter(self._format.fallback_mode, place)
        self._out.append(ParsedPiece(note=note))
        if header:
            self._at_mode_start = False
            self._emit(header)


_CALL_BEGINS = ModeTransition("content", "after")


@lru_cache(maxsize=64)
def _markers_with_openers(markers: SpecialStrings, openers: tuple[str, ...]) -> SpecialStrings:
    """The marks of a mode and opening literals; a mark of the mode goes before one like it."""
    more = {
        one
        for one in openers
        if not any(one.startswith(mark) or mark.startswith(one) for mark in markers.strings)
    }
    return SpecialStrings((*markers.strings, *more))
