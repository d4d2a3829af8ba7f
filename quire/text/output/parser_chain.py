"""Chain of parsers of an answer: first reasoning, then tool calls; the rest is content.

    text ──▶ reasoning ──▶ tools ──▶ hidden tokens taken out ──▶ [Piece ...]

The parsers get special tokens as text, because these can be tags; the last stage removes the rest.
The formats are in quire.text.reasoning and quire.text.tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.text.output.parsed_text import ParsedPiece, StreamingParser, merge_pieces
from quire.text.output.special_strings import SpecialStrings, SpecialStringStripper
from quire.text.reasoning.parser import ReasoningParser


def special_token_strings(tokens: Iterable[str]) -> SpecialStrings:
    """Special tokens, compiled once for all parsers. Of two that begin alike, the shorter."""
    kept: list[str] = []
    for token in sorted(filter(None, set(tokens))):
        if not kept or not token.startswith(kept[-1]):
            kept.append(token)
    return SpecialStrings(kept)


class ParserChain:
    """Parses one answer.

    first_call_only: further calls are dropped, with a note.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: StreamingParser | None = None,
        hidden: SpecialStrings | None = None,
        *,
        first_call_only: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._text = _PieceStripper(hidden, lambda text: ParsedPiece(text))
        self._reasoning_text = _PieceStripper(hidden, lambda text: ParsedPiece(reasoning=text))
        self._first_call_only = first_call_only
        self._dropped_calls: set[int] = set()

    def push(self, text: str, *, last: bool) -> list[ParsedPiece]:
        """See StreamingParser."""
        pieces = [ParsedPiece(text)] if text else []
        if self._reasoning is not None:
            pieces = self._reasoning.push(text, last=last)
        out: list[ParsedPiece] = []
        for piece in pieces:
            self._parse_piece(piece, out)
        if last and self._tools is not None:
            self._emit(self._tools.push("", last=True), out)
        if last:
            out += self._reasoning_text.push("", last=True) + self._text.push("", last=True)
        return merge_pieces(out)

    def _parse_piece(self, piece: ParsedPiece, out: list[ParsedPiece]) -> None:
        """One piece from the reasoning parser."""
        if piece.reasoning or piece.note:
            out += self._reasoning_text.push(piece.reasoning)
            if piece.note:
                out.append(ParsedPiece(note=piece.note))
        if piece.text and self._tools is not None:
            self._emit(self._tools.push(piece.text, last=False), out)
        elif piece.text:
            self._emit([ParsedPiece(piece.text)], out)

    def _emit(self, pieces: Sequence[ParsedPiece], out: list[ParsedPiece]) -> None:
        for piece in pieces:
            if piece.reasoning:
                out += self._text.push("", last=True) + self._reasoning_text.push(piece.reasoning)
            elif piece.text:
                out += self._reasoning_text.push("", last=True) + self._text.push(piece.text)
            elif piece.call is not None:
                out += self._reasoning_text.push("", last=True) + self._text.push("", last=True)
                self._emit_call(piece, out)
            else:
                out.append(piece)

    def _emit_call(self, piece: ParsedPiece, out: list[ParsedPiece]) -> None:
        assert piece.call is not None
        place = piece.call.index
        if self._first_call_only and place > 0:
            if place not in self._dropped_calls:
                self._dropped_calls.add(place)
                name = piece.call.name
                out.append(
                    ParsedPiece(
                        note=f"parallel_tool_calls=false: a further call of {name} is left out"
                    )
                )
            return
        out.append(piece)


class _PieceStripper:
    """Takes hidden tokens out of one kind of text."""

    def __init__(self, hidden: SpecialStrings | None, make: Callable[[str], ParsedPiece]) -> None:
        self._strings = hidden
        self._make = make
        self._stripper = SpecialStringStripper(hidden) if hidden is not None else None

    def push(self, text: str, *, last: bool = False) -> list[ParsedPiece]:
        if self._stripper is not None:
            text = self._stripper.push(text, last=last)
        return [self._make(text)] if text else []


class ReasoningTokenCounter:
    """Counts tokens of reasoning: those that begin within it. The marks are none.

    The count depends on the tokens alone, not on how they came.
    """

    def __init__(self, reader: ReasoningParser, decode: Callable[[Sequence[int]], str]) -> None:
        self.count = 0
        self._parser = reader
        self._decode = decode
        self._starts: list[int] = []
        self._position = 0
        self._span = 0

    def push(self, ids: Sequence[int]) -> None:
        """Add tokens. Their text must be pushed to the parser before count_pending()."""
        for one in ids:
            self._starts.append(self._position)
            self._position += len(self._decode((one,)))

    def count_pending(self) -> None:
        """Count the tokens whose place in the text is certain."""
        spans, sure = self._parser.spans, self._parser.settled_chars
        done = 0
        for start in self._starts:
            if start >= sure:
                break
            done += 1
            while self._span < len(spans) and self._span_ends_before(start):
                self._span += 1
            self.count += self._span < len(spans) and spans[self._span][0] <= start
        del self._starts[:done]

    def _span_ends_before(self, start: int) -> bool:
        """Whether the current span ends before this."""
        end = self._parser.spans[self._span][1]
        return end is not None and end <= start
