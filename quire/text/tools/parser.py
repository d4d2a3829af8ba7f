"""Streaming parser of tool calls, for every format.

It searches for the literals that begin a format's syntaxes, then executes the steps of that syntax.
Text that does not match becomes content again, from the last emitted position, with a note. The
parser continues at the character that did not match, so no text is read twice and time is linear.
Formats are in files beside this one; values become JSON in _value_parsers and _schema_coercion.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence

from quire.text.output.parsed_text import ParsedPiece, merge_pieces
from quire.text.tools._call_emitter import CallEmitter
from quire.text.tools._step_parser import StepParser
from quire.text.tools._text_cursor import (
    SPACES,
    MalformedMarkup,
    ParserCoroutine,
    TextCursor,
    UnexpectedEnd,
    text_before_pattern,
)
from quire.text.tools.base import (
    CallSyntax,
    HarmonyMessageStep,
    IdSource,
    ToolFormat,
    closing_literals,
    tools_by_name,
)

_BETWEEN = SPACES + ",;"


def new_hex_id() -> str:
    """A new id for a call."""
    return uuid.uuid4().hex


class ToolParser:
    """Parses the text of one sequence in one format.

    tools: the declared tools, in the form of the API. They give values between tags their types,
    and in formats without markup they tell calls from other text.
    parallel: False emits the first call only. eager: False emits a call when it is complete.
    ids: a source of new hex texts.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        parallel: bool = True,
        eager: bool = True,
        ids: IdSource = new_hex_id,
    ) -> None:
        self._format = tool_format
        self._cursor = TextCursor()
        self._out: list[ParsedPiece] = []
        self._tools = tools_by_name(tools or ())
        self._emitter = CallEmitter(
            self._cursor,
            self._out.append,
            tool_format,
            self._tools,
            parallel=parallel,
            eager=eager,
            ids=ids,
        )
        self._step_parser = StepParser(
            self._cursor, self._emitter, self._emit_content, self._emit_reasoning
        )
        self._syntax = tool_format.syntaxes[0]
        self._completed_before = 0  # complete calls before this syntax
        self._stray_closers: frozenset[str] = frozenset()  # closings that a broken form left behind
        self._new_line = True  # at the beginning of a line
        self._no_content_yet = True  # no content yet
        self._after_call = False  # nothing but whitespace since a call
        self._space_before = self._held_space = ""  # whitespace before a call, see _hold_space
        self._openers = tool_format.openers
        self._plain = text_before_pattern(
            (*SPACES, *tool_format.openers, *tool_format.closers, *tool_format.ignored)
        )
        self._coroutine: Iterator[None] = self._parse()

    @property
    def steps(self) -> int:
        """Number of parser steps so far; linear in the text for any chunks."""
        return self._cursor.steps

    def push(self, text: str, *, last: bool = False) -> list[ParsedPiece]:
        """The pieces that `text` adds, as far as they are certain. last: no text follows."""
        self._cursor.push(text, last)
        next(self._coroutine, None)
        if last:  # each holds the parser: it would be left to the collector
            self._coroutine = iter(())
            self._step_parser.close()
        news = merge_pieces(self._out)
        self._out.clear()
        return news

    # content

    def _parse(self) -> ParserCoroutine[None]:
        src = self._cursor
        while not src.at_end:
            src.steps += 1
            if found := self._plain.match(src.buf, src.pos):
                src.pos = found.end()
                self._emit_content(src.take_uncommitted())
                continue
            if src.pos == len(src.buf):
                yield
                continue
            if src.buf[src.pos] in SPACES:
                space = yield from src.skip_space()
                self._new_line = self._new_line or "\n" in space
                continue
            yield from self._parse_opener()
        if not self._after_call:
            self._emit_content(src.take_uncommitted())
        if self._emitter.suppressed:
            self._emit_note(
                f"{self._emitter.suppressed} more calls were dropped: only one was allowed"
            )

    def _parse_opener(self) -> ParserCoroutine[None]:
        """A character that may begin a mark."""
        src = self._cursor
        bare_here = self._new_line and (self._no_content_yet or bool(self._tools))
        marks = [
            mark
            for mark, syntax in self._openers.items()
            if bare_here or not syntax.bare or (syntax.inline and self._tools)
        ]
        loose = (*self._stray_closers, *self._format.ignored)
        found = yield from src.match_literal((*marks, *loose)) if marks or loose else _no_match()
        if found in loose:
            self._stray_closers -= {found}
            kept = src.take_uncommitted()[: -len(found)]
            if not self._after_call:
                self._emit_content(kept)
        elif found:
            space = src.uncommitted()[: -len(found)]
            src.pos -= self._openers[found].reread_chars
            yield from self._parse_call(self._openers[found], space)
        else:
            src.pos += 1
            self._emit_content(src.take_uncommitted())

    def _emit_reasoning(self, text: str) -> None:
        self._out.append(ParsedPiece(reasoning=text))
        self._after_call = False

    def _emit_content(self, text: str) -> None:
        if not text:
            return
        self._out.append(ParsedPiece(self._held_space + text))
        self._held_space = ""
        last_line = text.rpartition("\n")[2] if "\n" in text else text
        if last_line.strip():
            self._new_line = False
        elif "\n" in text:
            self._new_line = True
        self._after_call = False
        self._no_content_yet = self._no_content_yet and not text.strip()

    def _emit_note(self, note: str) -> None:
        self._out.append(ParsedPiece(note=note))

    # forms

    def _parse_call(self, syntax: CallSyntax, space: str) -> ParserCoroutine[None]:
        """A syntax, from behind its opening. space: the whitespace before it."""
        self._syntax = syntax
        self._completed_before = self._emitter.completed
        within_text = not (self._after_call or self._no_content_yet)
        self._space_before = space if within_text else ""
        try:
            yield from self._step_parser.parse(syntax)
            if not self._has_completed_call and not isinstance(syntax.steps[0], HarmonyMessageStep):
                raise MalformedMarkup("no call in it")  # noqa: TRY301 (as every other fault of a form)
        except MalformedMarkup as fault:
            self._reject(str(fault))
        except UnexpectedEnd:
            self._finish_truncated()
        else:
            self._hold_space(self._has_completed_call)
            self._after_call = self._after_call or self._has_completed_call
            self._new_line = True

    def _hold_space(self, called: bool) -> None:
        """Keep the whitespace between content and a call for content that follows the call; at the
        end of the text it is layout."""
        if called:
            self._held_space += self._space_before

    @property
    def _has_completed_call(self) -> bool:
        """This syntax has emitted complete calls."""
        return self._emitter.completed > self._completed_before

    def _reject(self, why: str) -> None:
        meant = bool(self._emitter.name) or not self._syntax.bare
        announced = self._emitter.abandon_call("broken")
        if meant or announced or self._has_completed_call:
            self._emit_note(f"malformed tool call ({self._format.name}): {why}")
        if self._has_completed_call:
            self._stray_closers |= frozenset(closing_literals(self._syntax.steps))
        self._hold_space(announced or self._has_completed_call)
        self._after_call = False
        self._emit_content(self._cursor.take_uncommitted())

    def _finish_truncated(self) -> None:
        meant = bool(self._emitter.name) or not self._syntax.bare
        announced = self._emitter.abandon_call("cut")
        text = self._cursor.take_rest()
        self._hold_space(announced or self._has_completed_call)
        if announced or (meant and text.strip(_BETWEEN)):
            self._emit_note(f"the text ended in a tool call ({self._format.name})")
        if announced or (self._has_completed_call and not text.strip(_BETWEEN)):
            self._after_call = True
        else:
            self._emit_content(text)


def _no_match() -> ParserCoroutine[str]:
    return ""
    yield
