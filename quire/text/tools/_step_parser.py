"""Executes the steps of call syntaxes: one method per kind of step (see base)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from quire.text.tools._call_emitter import MAX_NAME_CHARS, CallEmitter
from quire.text.tools._element_parser import parse_elements
from quire.text.tools._param_parser import parse_params
from quire.text.tools._python_call_parser import parse_python_calls, read_identifier
from quire.text.tools._text_cursor import (
    MalformedMarkup,
    ParserCoroutine,
    TextCursor,
    TextSink,
    UnexpectedEnd,
)
from quire.text.tools._value_parsers import parse_string, parse_value, read_string, to_json
from quire.text.tools.base import (
    ArgumentsStep,
    BranchStep,
    CallSyntax,
    CloseStep,
    ElementsStep,
    HarmonyMessageStep,
    LiteralStep,
    NameStep,
    ObjectStep,
    ParamsStep,
    PythonCallsStep,
    RepeatStep,
    SkipStep,
    SyntaxStep,
)

MAX_HEADER_CHARS = 1024
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NUMBERED = re.compile(r":\d+\Z")


class StepParser:
    """Executes steps over a text; its results go to `calls`, `content` and `reasoning`."""

    def __init__(
        self, src: TextCursor, calls: CallEmitter, content: TextSink, reasoning: TextSink
    ) -> None:
        self._cursor = src
        self._emitter = calls
        self._emit_content = content
        self._emit_reasoning = reasoning
        self._bare = self._declared_only = False
        self._completed_before = 0  # calls emitted before this syntax

    def close(self) -> None:
        """Release the emitter: no step will be executed any more."""
        self._emit_content = self._emit_reasoning = lambda text: None

    def parse(self, syntax: CallSyntax) -> ParserCoroutine[None]:
        """Execute a syntax. Raises MalformedMarkup where the text does not match its steps, and
        UnexpectedEnd where the text ends."""
        self._bare = syntax.bare
        self._declared_only = syntax.bare or syntax.declared_only
        self._completed_before = self._emitter.completed
        yield from self._parse_steps(syntax.steps)

    def _parse_steps(self, steps: Sequence[SyntaxStep]) -> ParserCoroutine[None]:
        for step in steps:
            yield from self._cursor.skip_space()
            yield from self._parse_step(step)

    def _parse_step(self, step: SyntaxStep) -> ParserCoroutine[None]:
        match step:
            case LiteralStep():
                found = yield from self._cursor.match_literal(step.texts, or_cut=True)
                if not found and not step.optional:
                    raise self._cursor.unexpected(step.texts[0])
            case CloseStep():
                yield from self._parse_close(step)
            case SkipStep():
                yield from self._cursor.read_bounded(step.end, "a label", MAX_HEADER_CHARS)
            case NameStep():
                yield from self._parse_name(step)
            case ArgumentsStep():
                yield from self._parse_arguments(step)
            case ObjectStep():
                yield from self._parse_objects(step) if step.many else self._parse_object(step)
            case ParamsStep():
                yield from parse_params(self._cursor, self._emitter, step)
            case ElementsStep():
                yield from parse_elements(self._cursor, self._emitter, step)
            case PythonCallsStep():
                yield from parse_python_calls(
                    self._cursor, self._emitter, step, declared_only=self._declared_only
                )
            case HarmonyMessageStep():
                yield from self._parse_message(step)
            case RepeatStep():
                yield from self._parse_repeat(step)
            case BranchStep():
                found = yield from self._cursor.match_literal(
                    step.lookahead, take=False, or_cut=True
                )
                yield from self._parse_steps(step.then if found else step.otherwise)

    def _parse_close(self, step: CloseStep) -> ParserCoroutine[None]:
        try:
            found = yield from self._cursor.match_literal(step.texts, or_cut=True)
        except UnexpectedEnd:
            self._cursor.take_rest()  # nothing, or the beginning of the literal: no text
            raise
        if found:
            self._commit()
        elif not step.optional:
            raise self._cursor.unexpected(step.texts[0])

    def _commit(self) -> None:
        """Commit the parsed text to emitted calls; without one, it may become content again."""
        if self._emitter.completed > self._completed_before:
            self._cursor.commit()

    def _parse_repeat(self, step: RepeatStep) -> ParserCoroutine[None]:
        first = step.steps[0]
        ahead = step.separators or (first.texts if isinstance(first, LiteralStep) else ())
        assert ahead, "a repeated step needs separators or a first literal"
        while True:
            yield from self._parse_steps(step.steps)
            yield from self._cursor.skip_space()
            if not (yield from self._cursor.match_literal(ahead, take=bool(step.separators))):
                return

    # names and JSON

    def _parse_name(self, step: NameStep) -> ParserCoroutine[None]:
        src = self._cursor
        if not (step.end or step.before):
            name = yield from read_identifier(src, "a function")
            self._emitter.set_name(name, declared_only=self._declared_only)
            return
        text, close = yield from src.read_bounded(
            (*step.end, *step.before), "a name", MAX_NAME_CHARS
        )
        own_id = ""
        if close in step.before:
            src.pos -= len(close)
        elif step.id_after and close == step.id_after:
            ends = tuple(other for other in step.end if other != close)
            own_id, _ = yield from src.read_bounded(ends, "an id", MAX_NAME_CHARS)
        name = text.strip().strip("\"'")
        if step.numbered:
            own_id = name
            name = _NUMBERED.sub("", name).removeprefix("functions.")
        self._emitter.set_name(name, declared_only=self._declared_only, own_id=own_id.strip())

    def _parse_arguments(self, step: ArgumentsStep) -> ParserCoroutine[None]:
        char = yield from self._cursor.peek()
        if char != "{":
            raise MalformedMarkup(f"{char!r} where the arguments belong")
        self._emitter.expect_object()
        yield from parse_value(self._cursor, self._emitter.emit_arguments, step.language)
        self._emitter.complete_call()

    def _parse_objects(self, step: ObjectStep) -> ParserCoroutine[None]:
        """A list of calls, or calls without a list."""
        if (yield from self._cursor.peek_nonspace()) == "{":
            while (yield from self._cursor.peek_nonspace()) == "{":
                yield from self._parse_object(step)
            return
        yield from self._cursor.expect_char("[")
        while (yield from self._cursor.peek_nonspace()) != "]":
            yield from self._parse_object(step)
            if (yield from self._cursor.peek_nonspace()) == ",":
                self._cursor.pos += 1
            elif self._cursor.buf[self._cursor.pos] != "]":
                break
        yield from self._cursor.expect_char("]")
        self._commit()

    def _parse_object(self, step: ObjectStep) -> ParserCoroutine[None]:
        calls, before = self._emitter, self._emitter.completed
        yield from self._cursor.expect_char("{")
        try:
            yield from self._parse_members(step, before)
        except UnexpectedEnd:
            if calls.completed > before:
                self._cursor.take_rest()  # the text after the arguments is not part of the call
            raise
        if calls.completed == before:
            if not calls.name:
                raise MalformedMarkup("an object without a name")
            calls.complete_without_arguments()
        self._cursor.commit()

    def _parse_members(self, step: ObjectStep, before: int) -> ParserCoroutine[None]:
        src = self._cursor
        while (yield from self._cursor.peek_nonspace()) != "}":
            key = yield from read_string(src, MAX_NAME_CHARS, "a key")
            yield from self._cursor.expect_char(":")
            char = yield from self._cursor.peek_nonspace()
            yield from self._parse_member(step, key, char, before)
            if self._emitter.completed > before:
                src.commit()
            if (yield from self._cursor.peek_nonspace()) == "}":
                break
            yield from self._cursor.expect_char(",")
        src.pos += 1

    def _parse_member(
        self, step: ObjectStep, key: str, char: str, before: int
    ) -> ParserCoroutine[None]:
        src, calls = self._cursor, self._emitter
        done = calls.completed > before
        if not done and key in step.name and char in "\"'":
            name = yield from read_string(src, MAX_NAME_CHARS, "a name")
            self._set_name(name)
        elif not done and key in step.arguments:
            yield from self._parse_object_arguments(char)
        elif not done and key in step.id and char in "\"'":
            calls.set_id((yield from read_string(src, MAX_NAME_CHARS, "an id")))
        elif not done and key == "function" and char == "{":
            src.pos += 1
            yield from self._parse_members(step, before)
        elif not done and step.keyed and not calls.name:
            calls.set_name(key, declared_only=self._declared_only)
            yield from self._parse_object_arguments(char)
        elif self._bare and not calls.name and key not in ("id", "type"):
            raise MalformedMarkup(f"{key!r} is nothing of a call")
        else:
            yield from parse_value(src, _ignore)

    def _set_name(self, name: str) -> None:
        if self._emitter.name:
            raise MalformedMarkup("an object with two names")
        self._emitter.set_name(
            name, declared_only=self._declared_only, own_id=self._emitter.model_call_id
        )
        if self._emitter.arguments_complete:
            self._emitter.begin_call()
            self._emitter.complete_call()

    def _parse_object_arguments(self, char: str) -> ParserCoroutine[None]:
        """Arguments as an object, as an object in a string, or as null."""
        src, calls = self._cursor, self._emitter
        if calls.arguments_complete:
            raise MalformedMarkup("an object with arguments twice")
        if char == "{":
            calls.expect_object()
            yield from parse_value(src, calls.emit_arguments)
        elif char in "\"'":
            parts: list[str] = []
            yield from parse_string(src, parts.append)
            inner = to_json(json.loads("".join(parts)))
            if inner is None or not inner.startswith("{"):
                raise MalformedMarkup("a text that is no object where the arguments belong")
            calls.emit_arguments(inner)
        else:
            yield from self._parse_null()
            return
        if calls.name:
            if not calls.open:
                calls.begin_call()
            calls.complete_call()
        else:
            calls.arguments_complete = True

    def _parse_null(self) -> ParserCoroutine[None]:
        parts: list[str] = []
        yield from parse_value(self._cursor, parts.append)
        if parts != ["null"]:
            raise MalformedMarkup("something that is no object where the arguments belong")

    # messages

    def _parse_message(self, step: HarmonyMessageStep) -> ParserCoroutine[None]:
        src = self._cursor
        header, _ = yield from src.read_bounded((step.body,), "a header", MAX_HEADER_CHARS)
        header = step.header + header
        recipient = _RECIPIENT.search(header)
        if recipient:
            yield from self._parse_message_call(step, recipient[1])
            return
        channel = _CHANNEL.search(header)
        src.commit()
        sink = self._emit_reasoning if channel and channel[1] == "analysis" else self._emit_content

        def emit(text: str) -> None:
            src.commit()
            sink(text)

        try:
            close = yield from src.read_until((*step.ends, *step.before), emit)
        except UnexpectedEnd:
            if rest := src.take_rest():
                emit(rest)
            return
        if close in step.before:
            src.pos -= len(close)
        src.commit()

    def _parse_message_call(
        self, step: HarmonyMessageStep, recipient: str
    ) -> ParserCoroutine[None]:
        if recipient not in self._emitter.tools and not recipient.startswith("functions."):
            raise MalformedMarkup(f"a message to {recipient[:80]!r}, which is no function")
        self._emitter.set_name(recipient.removeprefix("functions."), declared_only=False)
        yield from self._cursor.skip_space()
        yield from self._parse_arguments(ArgumentsStep())
        yield from self._cursor.skip_space()
        yield from self._parse_close(CloseStep(step.ends, optional=True))


def _ignore(text: str) -> None:
    """For a value that is not part of the call."""
