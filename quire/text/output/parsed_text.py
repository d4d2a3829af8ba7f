"""Parts of the text of a model, for every parser: content, reasoning, calls, notes.

A `StreamingParser` takes the text as it arrives and returns pieces. Any cut of the text into pushes
gives the same concatenation: every parser is tested against this contract. The markup of each model
is in quire.text.tools and quire.text.reasoning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

ToolCallOutcome = Literal["whole", "cut", "broken"]
"""How a call ended: as it should; with the text; in markup that made no sense."""


@dataclass(frozen=True, slots=True)
class ParsedCallDelta:
    """News of one call. `id` and `name` come once, first; `arguments` in pieces; `end` last.

    The arguments of a call that ended whole are the text of a JSON object. Of one that was cut
    or broken they are the beginning of one.
    """

    index: int
    """Which of the calls in this text, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    outcome: ToolCallOutcome | None = None


@dataclass(frozen=True, slots=True)
class ParsedPiece:
    """A part of a text."""

    text: str = ""
    """Content."""
    reasoning: str = ""
    call: ParsedCallDelta | None = None
    note: str = ""
    """A diagnostic: markup that was meant to be something and came back as content."""


class StreamingParser(Protocol):
    """Parses the text of one sequence incrementally."""

    def push(self, text: str, *, last: bool) -> list[ParsedPiece]:
        """Return the pieces that `text` adds, as far as certain. last: hold nothing back."""
        ...


@dataclass(slots=True)
class ParsedText:
    """All pieces of a text put together, for an answer that is not streamed."""

    text: str = ""
    reasoning: str = ""
    calls: list[ParsedCallDelta] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def append(self, piece: ParsedPiece) -> None:
        """Put the next piece behind what is there."""
        self.text += piece.text
        self.reasoning += piece.reasoning
        if piece.note:
            self.notes.append(piece.note)
        if piece.call is not None:
            self._append_call(piece.call)

    def _append_call(self, news: ParsedCallDelta) -> None:
        if news.index == len(self.calls):
            self.calls.append(news)
            return
        so_far = self.calls[news.index]
        arguments = so_far.arguments + news.arguments
        end = news.outcome or so_far.outcome
        self.calls[news.index] = ParsedCallDelta(
            so_far.index, so_far.id, so_far.name, arguments, end
        )


def collect_pieces(pieces: Iterable[ParsedPiece]) -> ParsedText:
    """Join all pieces of a text."""
    speech = ParsedText()
    for piece in merge_pieces(pieces):
        speech.append(piece)
    return speech


def merge_pieces(pieces: Iterable[ParsedPiece]) -> list[ParsedPiece]:
    """Merge consecutive pieces of a kind, in one pass."""
    out: list[ParsedPiece] = []
    run: list[ParsedPiece] = []
    for piece in pieces:
        if run and not _can_merge(run[-1], piece):
            out.append(_merge_run(run))
            run = []
        run.append(piece)
    if run:
        out.append(_merge_run(run))
    return out


def _can_merge(a: ParsedPiece, b: ParsedPiece) -> bool:
    """Whether b only continues a."""
    if a.note or b.note:
        return False
    if a.call is not None or b.call is not None:
        return a.call is not None and b.call is not None and a.call.index == b.call.index
    return bool(a.text) == bool(b.text) and bool(a.reasoning) == bool(b.reasoning)


def _merge_run(run: list[ParsedPiece]) -> ParsedPiece:
    first = run[0]
    if len(run) == 1:
        return first
    if first.call is None:
        return ParsedPiece("".join(p.text for p in run), "".join(p.reasoning for p in run))
    calls = [p.call for p in run if p.call is not None]
    arguments = "".join(call.arguments for call in calls)
    head = calls[0]
    return ParsedPiece(
        call=ParsedCallDelta(head.index, head.id, head.name, arguments, calls[-1].outcome)
    )
