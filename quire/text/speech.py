"""What the text of a model is made of, for every reader of it: content, reasoning, calls, notes.

A `Reader` is fed the text as it comes and tells pieces. Any cut of the text into pushes gives the
same concatenation: that is the contract every reader is tested against. Not here: what markup a
model uses (quire.text.tools, quire.text.reasoning) and how a server shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

Ending = Literal["whole", "cut", "broken"]
"""How a call ended: as it should; with the text; in markup that made no sense."""


@dataclass(frozen=True, slots=True)
class Call:
    """News of one call. `id` and `name` come once, first; `arguments` in pieces; `end` last.

    The arguments of a call that ended whole are the text of a JSON object. Of one that was cut
    or broken they are the beginning of one.
    """

    place: int
    """Which of the calls in this text, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    end: Ending | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that a text says."""

    text: str = ""
    """Content."""
    reasoning: str = ""
    call: Call | None = None
    note: str = ""
    """A diagnostic: markup that was meant to be something and came back as content."""


class Reader(Protocol):
    """Reads the text of one sequence as it comes."""

    def push(self, text: str, *, last: bool) -> list[Piece]:
        """What `text` adds, as far as it is certain. last: nothing follows, hold nothing back."""
        ...


@dataclass(slots=True)
class Speech:
    """All pieces of a text put together, for an answer that is not streamed."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Put the next piece behind what is there."""
        self.text += piece.text
        self.reasoning += piece.reasoning
        if piece.note:
            self.notes.append(piece.note)
        if piece.call is not None:
            self._add_call(piece.call)

    def _add_call(self, news: Call) -> None:
        if news.place == len(self.calls):
            self.calls.append(news)
            return
        so_far = self.calls[news.place]
        arguments = so_far.arguments + news.arguments
        end = news.end or so_far.end
        self.calls[news.place] = Call(so_far.place, so_far.id, so_far.name, arguments, end)


def gather(pieces: Iterable[Piece]) -> Speech:
    """All pieces of a text -> what it says."""
    speech = Speech()
    for piece in joined(pieces):
        speech.add(piece)
    return speech


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same news in as few pieces as possible, in one pass whatever their number."""
    out: list[Piece] = []
    run: list[Piece] = []
    for piece in pieces:
        if run and not _alike(run[-1], piece):
            out.append(_one(run))
            run = []
        run.append(piece)
    if run:
        out.append(_one(run))
    return out


def _alike(a: Piece, b: Piece) -> bool:
    """Whether b only goes on with what a is about."""
    if a.note or b.note:
        return False
    if a.call is not None or b.call is not None:
        return a.call is not None and b.call is not None and a.call.place == b.call.place
    return bool(a.text) == bool(b.text) and bool(a.reasoning) == bool(b.reasoning)


def _one(run: list[Piece]) -> Piece:
    first = run[0]
    if len(run) == 1:
        return first
    if first.call is None:
        return Piece("".join(p.text for p in run), "".join(p.reasoning for p in run))
    calls = [p.call for p in run if p.call is not None]
    arguments = "".join(call.arguments for call in calls)
    head = calls[0]
    return Piece(call=Call(head.place, head.id, head.name, arguments, calls[-1].end))
