"""The one machine that reads every dialect of tool calls, as the text comes.

It looks for the marks of a dialect's forms in the text; where one stands it walks the form's
steps. What makes no sense comes back as content, from what was last told on, with a note; the
machine goes on with the character it could not take, so no text is read twice and time is linear.

Not here: the dialects (a file each beside this one), and how values become JSON (_values, _typed).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence

from quire.text.speech import Piece, joined
from quire.text.tools._source import SPACES, Cut, Malformed, Source, Walk, plain_before
from quire.text.tools._telling import Calls
from quire.text.tools._walks import Walks
from quire.text.tools.base import Dialect, Form, Ids, Message, closes, declared

_BETWEEN = SPACES + ",;"


def fresh_hex() -> str:
    """A new id for a call."""
    return uuid.uuid4().hex


class Parser:
    """Reads the text of one sequence in one dialect.

    tools: what was declared, as callers write it. It gives values between tags their types, and
    tells calls from other text where nothing else does.
    parallel: False tells the first call only. eager: False tells a call when it is whole or not
    at all. ids: a source of fresh hex texts.
    """

    def __init__(
        self,
        dialect: Dialect,
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        parallel: bool = True,
        eager: bool = True,
        ids: Ids = fresh_hex,
    ) -> None:
        self._dialect = dialect
        self._src = Source()
        self._out: list[Piece] = []
        self._tools = declared(tools or ())
        self._calls = Calls(
            self._src,
            self._out.append,
            dialect,
            self._tools,
            parallel=parallel,
            eager=eager,
            ids=ids,
        )
        self._walks = Walks(self._src, self._calls, self._content, self._reasoning)
        self._form = dialect.forms[0]
        self._told_before = 0  # calls told whole before this form
        self._stray: frozenset[str] = frozenset()  # closings that a broken form left behind
        self._new_line = True  # nothing stands before this on its line
        self._silent = True  # no content yet
        self._after_call = False  # nothing but whitespace since a call
        self._marks = dialect.marks
        self._plain = plain_before((*SPACES, *dialect.marks, *dialect.ends, *dialect.drop))
        self._walk: Iterator[None] = self._read()

    @property
    def steps(self) -> int:
        """Of work done so far; linear in the text however it was cut."""
        return self._src.steps

    @property
    def calls(self) -> int:
        """Whole calls so far, told or not."""
        return self._calls.told

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """What `text` adds, as far as it is certain. last: nothing follows."""
        self._src.push(text, last)
        next(self._walk, None)
        if last:  # each holds the parser: it would be left to the collector
            self._walk = iter(())
            self._walks.end()
        news = joined(self._out)
        self._out.clear()
        return news

    # content

    def _read(self) -> Walk[None]:
        src = self._src
        while not src.over:
            src.steps += 1
            if found := self._plain.match(src.buf, src.pos):
                src.pos = found.end()
                self._content(src.release())
                continue
            if src.pos == len(src.buf):
                yield
                continue
            if src.buf[src.pos] in SPACES:
                space = yield from src.space()
                self._new_line = self._new_line or "\n" in space
                continue
            yield from self._mark()
        if not self._after_call:
            self._content(src.release())
        if self._calls.unsaid:
            self._note(f"{self._calls.unsaid} more calls were not told: only one was allowed")

    def _mark(self) -> Walk[None]:
        """A character that may begin a mark."""
        src = self._src
        bare_here = self._new_line and (self._silent or bool(self._tools))
        marks = [m for m, form in self._marks.items() if bare_here or not form.bare]
        loose = (*self._stray, *self._dialect.drop)
        found = yield from src.literal((*marks, *loose)) if marks or loose else _nothing()
        if found in loose:
            self._stray -= {found}
            kept = src.release()[: -len(found)]
            if not self._after_call:
                self._content(kept)
        elif found:
            src.pos -= self._marks[found].keep
            yield from self._run_form(self._marks[found])
        else:
            src.pos += 1
            self._content(src.release())

    def _reasoning(self, text: str) -> None:
        self._out.append(Piece(reasoning=text))
        self._after_call = False

    def _content(self, text: str) -> None:
        if not text:
            return
        self._out.append(Piece(text))
        last_line = text.rpartition("\n")[2] if "\n" in text else text
        if last_line.strip():
            self._new_line = False
        elif "\n" in text:
            self._new_line = True
        self._after_call = False
        self._silent = self._silent and not text.strip()

    def _note(self, note: str) -> None:
        self._out.append(Piece(note=note))

    # forms

    def _run_form(self, form: Form) -> Walk[None]:
        self._form = form
        self._told_before = self._calls.told
        try:
            yield from self._walks.run(form.steps, bare=form.bare)
            if not self._some_told and not isinstance(form.steps[0], Message):
                raise Malformed("no call in it")  # noqa: TRY301 (as every other fault of a form)
        except Malformed as fault:
            self._give_back(str(fault))
        except Cut:
            self._cut_off()
        else:
            self._after_call = self._after_call or self._some_told
            self._new_line = True

    @property
    def _some_told(self) -> bool:
        """This form has told whole calls."""
        return self._calls.told > self._told_before

    def _give_back(self, why: str) -> None:
        meant = bool(self._calls.name) or not self._form.bare
        announced = self._calls.stop("broken")
        if meant or announced or self._some_told:
            self._note(f"malformed tool call ({self._dialect.name}): {why}")
        if self._some_told:
            self._stray |= frozenset(closes(self._form.steps))
        self._after_call = False
        self._content(self._src.release())

    def _cut_off(self) -> None:
        meant = bool(self._calls.name) or not self._form.bare
        told = self._calls.stop("cut")
        text = self._src.rest()
        if told or (meant and text.strip(_BETWEEN)):
            self._note(f"the text ended in a tool call ({self._dialect.name})")
        if told or (self._some_told and not text.strip(_BETWEEN)):
            self._after_call = True
        else:
            self._content(text)


def _nothing() -> Walk[str]:
    return ""
    yield
