"""The chain that reads an answer: reasoning first, tool calls after, content is what is left.

    text ──▶ reasoning ──▶ tools ──▶ hidden tokens taken out ──▶ [Piece ...]

Readers see special tokens as text (they are marks); what is left of them is taken out at the end.
Not here: dialects (quire.text.reasoning, quire.text.tools), how a server shows pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.text.marks import Eraser, Marks
from quire.text.reasoning.machine import Machine
from quire.text.speech import Piece, Reader, joined


def hidden_marks(tokens: Iterable[str]) -> Marks:
    """Special tokens, compiled once for all readers. Of two that begin alike, the shorter."""
    kept: list[str] = []
    for token in sorted(filter(None, set(tokens))):
        if not kept or not token.startswith(kept[-1]):
            kept.append(token)
    return Marks(kept)


class Reading:
    """The reader of one answer.

    first_call_only: what comes of further calls is dropped, with a note.
    """

    def __init__(
        self,
        reasoning: Machine | None = None,
        tools: Reader | None = None,
        hidden: Marks | None = None,
        *,
        first_call_only: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._text = _Eraser(hidden, lambda text: Piece(text))
        self._thoughts = _Eraser(hidden, lambda text: Piece(reasoning=text))
        self._first_call_only = first_call_only
        self._dropped: set[int] = set()

    def push(self, text: str, *, last: bool) -> list[Piece]:
        """See Reader."""
        pieces = [Piece(text)] if text else []
        if self._reasoning is not None:
            pieces = self._reasoning.push(text, last=last)
        out: list[Piece] = []
        for piece in pieces:
            self._read(piece, out)
        if last and self._tools is not None:
            self._say(self._tools.push("", last=True), out)
        if last:
            out += self._thoughts.push("", last=True) + self._text.push("", last=True)
        return joined(out)

    def _read(self, piece: Piece, out: list[Piece]) -> None:
        """One piece of what the reader of reasoning says."""
        if piece.reasoning or piece.note:
            out += self._thoughts.push(piece.reasoning)
            if piece.note:
                out.append(Piece(note=piece.note))
        if piece.text and self._tools is not None:
            self._say(self._tools.push(piece.text, last=False), out)
        elif piece.text:
            self._say([Piece(piece.text)], out)

    def _say(self, pieces: Sequence[Piece], out: list[Piece]) -> None:
        for piece in pieces:
            if piece.reasoning:
                out += self._text.push("", last=True) + self._thoughts.push(piece.reasoning)
            elif piece.text:
                out += self._thoughts.push("", last=True) + self._text.push(piece.text)
            elif piece.call is not None:
                out += self._thoughts.push("", last=True) + self._text.push("", last=True)
                self._call(piece, out)
            else:
                out.append(piece)

    def _call(self, piece: Piece, out: list[Piece]) -> None:
        assert piece.call is not None
        place = piece.call.place
        if self._first_call_only and place > 0:
            if place not in self._dropped:
                self._dropped.add(place)
                name = piece.call.name
                out.append(
                    Piece(note=f"parallel_tool_calls=false: a further call of {name} is left out")
                )
            return
        out.append(piece)


class _Eraser:
    """Takes hidden tokens out of one kind of text."""

    def __init__(self, hidden: Marks | None, make: Callable[[str], Piece]) -> None:
        self._marks = hidden
        self._make = make
        self._eraser = Eraser(hidden) if hidden is not None else None

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        if self._eraser is not None:
            text = self._eraser.push(text, last=last)
        return [self._make(text)] if text else []


class ReasoningTokens:
    """Counts tokens of reasoning: those that begin within it. The marks are none.

    The count depends on the tokens alone, not on how they came.
    """

    def __init__(self, reader: Machine, decode: Callable[[Sequence[int]], str]) -> None:
        self.count = 0
        self._reader = reader
        self._decode = decode
        self._starts: list[int] = []
        self._at = 0
        self._span = 0

    def push(self, ids: Sequence[int]) -> None:
        """Take note of tokens; their text has to be pushed to the reader before settle()."""
        for one in ids:
            self._starts.append(self._at)
            self._at += len(self._decode((one,)))

    def settle(self) -> None:
        """Count the tokens of which it is known what they are."""
        spans, sure = self._reader.spans, self._reader.sure
        done = 0
        for start in self._starts:
            if start >= sure:
                break
            done += 1
            while self._span < len(spans) and self._ends(start):
                self._span += 1
            self.count += self._span < len(spans) and spans[self._span][0] <= start
        del self._starts[:done]

    def _ends(self, start: int) -> bool:
        """The span that is looked at ends before this."""
        end = self._reader.spans[self._span][1]
        return end is not None and end <= start
