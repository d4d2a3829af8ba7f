"""Reads reasoning and content apart, whatever the dialect and however the text is cut.

Not here: what the marks are (a Dialect says). State: the mode, and two things held back. `_held`:
the end of the text, which may turn out to be a mark. `_space`: white space, of which only what
follows says whether it belongs to the text. Each character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.text.reasoning.base import LONGEST_HEADER, WHITE, Dialect, Kind, Mode, Turn
from quire.text.speech import Piece, joined

_white = re.compile(f"[{WHITE}]*").match


class Machine:
    """The reader of one answer. Begins as the prompt ended.

    begun: the text of a message in the prompt that the answer goes on with. spans: [start, end)
    of stretches of reasoning in the text, None where it goes on; they are certain up to `sure`.
    """

    def __init__(
        self,
        dialect: Dialect,
        prompt: str = "",
        variables: Mapping[str, object] | None = None,
        *,
        begun: str = "",
    ) -> None:
        self.spans: list[tuple[int, int | None]] = []
        self.sure = 0  # where in the whole text what is held begins
        self._dialect = dialect
        self._out: list[Piece] = []
        self._said: set[Kind] = set()
        self._space: list[str] = []
        self._header = ""
        self._held = ""
        self._fresh = True  # nothing but white space was said in this mode
        self._prefix = dialect.prefix
        prompt, begun = prompt.rstrip(WHITE), begun.strip(WHITE)
        goes_on = bool(begun) and prompt.endswith(begun)
        before = prompt[: len(prompt) - len(begun)] if goes_on else prompt
        self._enter(dialect.start(before, variables or {}), 0)
        if goes_on:
            self._go_on(begun)

    def _go_on(self, begun: str) -> None:
        """Be where the text so far leads to; of it nothing is told."""
        self._prefix = ""
        self.push(begun, last=False)
        if self._mode.kind is Kind.HEADER:
            self._enter(self._dialect.plain, 0)
        self._held, self._joint, self.sure = "", "", 0
        self._space.clear()
        self._said.clear()
        self.spans = [(0, None)] if self._mode.kind is Kind.REASONING else []

    @property
    def mode(self) -> Mode:
        """Where it is: what comes next is read in this mode."""
        return self._mode

    def push(self, text: str, *, last: bool) -> list[Piece]:
        """See Reader."""
        if self._prefix and (text or last):
            self._out.append(Piece(self._prefix))
            self._prefix = ""
        data = self._held + text
        at: int | None = 0
        while at is not None:
            at = self._step(data, at, last)
        if last:
            self._end()
        out, self._out = self._out, []
        return joined(out)

    def _step(self, data: str, at: int, last: bool) -> int | None:
        """Read from data[at:] past the next mark; None: all is read but for what is held."""
        mode = self._mode
        if self._fresh and (mode.first or mode.lead):
            at = self._skip(data, at)
            mark = self._first.at(data, at)
            if mark is not None:
                return self._turn(mode.first[mark], mark, at)
            if not last and self._first.open(data, at) == at:
                self._hold(data, at)
                return None
        if mode.kind is Kind.HEADER:
            return self._head(data, at, last)
        found = self._marks.find(data, at)
        if found is not None:
            mark, place = found
            self._text(data[at:place])
            return self._turn(mode.marks[mark], mark, place)
        end = len(data) if last else self._marks.open(data, at)
        self._text(data[at:end])
        self._hold(data, end)
        return None

    def _head(self, data: str, at: int, last: bool) -> int | None:
        """Gather a header, and turn where it is complete."""
        most = at + LONGEST_HEADER - len(self._header)
        found = self._marks.find(data, at, most + 1)
        end = found[1] if found else len(data) if last else self._marks.open(data, at)
        self._header += data[at : min(end, most)]
        if end > most:
            self._no_header("a header without end; it is left in the text", self.sure + most)
            return most
        if found is None:
            self._hold(data, end)
            return None
        mark, place = found
        turn = self._mode.marks[mark]
        if not isinstance(turn.into, str):
            return self._turn(turn, mark, place)
        self._no_header(f"a header that ends in {mark}; it is left in the text", self.sure + place)
        return place + len(mark)

    def _skip(self, data: str, at: int) -> int:
        """Past white space at the beginning of a mode."""
        found = _white(data, at)
        end = found.end() if found is not None else at
        if end > at:
            self._space.append(data[at:end])
        return end

    def _hold(self, data: str, end: int) -> None:
        self._held = data[end:]
        self.sure += end

    # -- text ---------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        """Text of the mode. What may have to be dropped before a mark waits in _space."""
        tail = self._mode.tail
        kept = text.rstrip(tail) if tail else text
        if kept:
            self._settle()
            self._tell(kept)
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def _settle(self) -> None:
        """White space that was held back is text after all."""
        space = "".join(self._space)
        self._space.clear()
        if self._fresh:
            self._fresh = False
            space = space.lstrip(self._mode.lead) if self._mode.lead else space
        if space:
            self._tell(space)

    def _tell(self, text: str) -> None:
        text, self._joint = self._joint + text, ""
        if not self._mode.verbatim:
            self._said.add(self._mode.kind)
        thinks = self._mode.kind is Kind.REASONING
        self._out.append(Piece(reasoning=text) if thinks else Piece(text))

    def _end(self) -> None:
        if self._mode.kind is Kind.HEADER:
            self._no_header("the text ends in a header; it is left in the text", self.sure)
        elif not self._mode.tail:
            self._settle()

    # -- from mode to mode --------------------------------------------------------------------

    def _turn(self, turn: Turn, mark: str, place: int) -> int:
        """Into the next mode; where in the data to go on."""
        if turn.keep == "before":
            self._settle()
            self._tell(mark)
        if turn.note:
            self._out.append(Piece(note=turn.note))
        self._leave(self.sure + place)
        after = place if turn.keep == "after" else place + len(mark)
        if isinstance(turn.into, str):
            self._enter(turn.into, self.sure + after)
            return after
        header = self._header
        self._enter(turn.into(header), self.sure + after)
        if self._mode.verbatim:
            self._fresh = False
            self._tell(header + mark)
        return after

    def _leave(self, place: int) -> None:
        if self._mode.kind is Kind.REASONING:
            self.spans[-1] = (self.spans[-1][0], place)

    def _enter(self, name: str, place: int) -> None:
        """place: where in the whole text the mode begins."""
        self._mode = mode = self._dialect.modes[name]
        self._marks = self._dialect.marks[name]
        self._first = self._dialect.first[name]
        self._fresh = True
        self._space.clear()
        self._joint = mode.joint if mode.kind in self._said else ""
        if mode.kind is Kind.HEADER:
            self._header = ""
        if mode.kind is Kind.REASONING:
            self.spans.append((place, None))

    def _no_header(self, note: str, place: int) -> None:
        """What was taken for a header is text."""
        header = self._header
        self._enter(self._dialect.plain, place)
        self._out.append(Piece(note=note))
        if header:
            self._fresh = False
            self._tell(header)
