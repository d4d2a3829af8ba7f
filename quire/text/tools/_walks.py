"""How each kind of step is walked. One method a kind; what the kinds mean is said in base."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from quire.text.tools._params import params
from quire.text.tools._python import python_calls
from quire.text.tools._source import Cut, Malformed, Source, Tell, Walk
from quire.text.tools._telling import MOST_LONG_NAME, Calls
from quire.text.tools._values import decoded, string, value, whole
from quire.text.tools.base import (
    Arguments,
    Close,
    Either,
    Label,
    Many,
    Mark,
    Message,
    Name,
    Object,
    Params,
    PythonCalls,
    Step,
)

MOST_LONG_HEADER = 1024
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NUMBERED = re.compile(r":\d+\Z")


class Walks:
    """Walks steps over a source; what it finds goes to `calls`, `content` and `reasoning`."""

    def __init__(self, src: Source, calls: Calls, content: Tell, reasoning: Tell) -> None:
        self._src = src
        self._calls = calls
        self._content = content
        self._reasoning = reasoning
        self._bare = False
        self._before = 0  # calls told before this form

    def end(self) -> None:
        """Nothing is walked any more: let go of who is told."""
        self._content = self._reasoning = lambda text: None

    def run(self, steps: Sequence[Step], *, bare: bool) -> Walk[None]:
        """Walk a form. Malformed where the text is not what the steps say; Cut where it ends.

        bare: only declared functions are calls.
        """
        self._bare = bare
        self._before = self._calls.told
        yield from self._run(steps)

    def _run(self, steps: Sequence[Step]) -> Walk[None]:
        for step in steps:
            yield from self._src.space()
            yield from self._one(step)

    def _one(self, step: Step) -> Walk[None]:
        match step:
            case Mark():
                yield from self._src.expect(step.texts)
            case Close():
                yield from self._close(step)
            case Label():
                yield from self._src.short(step.end, "a label", MOST_LONG_HEADER)
            case Name():
                yield from self._name(step)
            case Arguments():
                yield from self._arguments(step)
            case Object():
                yield from self._objects(step) if step.many else self._object(step)
            case Params():
                yield from params(self._src, self._calls, step)
            case PythonCalls():
                yield from python_calls(self._src, self._calls, step, bare=self._bare)
            case Message():
                yield from self._message(step)
            case Many():
                yield from self._many(step)
            case Either():
                found = yield from self._src.literal(step.next, take=False, or_cut=True)
                yield from self._run(step.then if found else step.other)

    def _close(self, step: Close) -> Walk[None]:
        try:
            found = yield from self._src.literal(step.texts, or_cut=True)
        except Cut:
            self._src.rest()  # nothing, or the beginning of the literal: no text
            raise
        if found:
            self._settle()
        elif not step.optional:
            raise Malformed(f"{self._src.buf[self._src.pos]!r} where {step.texts[0]!r} belongs")

    def _settle(self) -> None:
        """What was read belongs to calls that were told; if none was, it may come back."""
        if self._calls.told > self._before:
            self._src.settle()

    def _many(self, step: Many) -> Walk[None]:
        first = step.steps[0]
        ahead = step.between or (first.texts if isinstance(first, Mark) else ())
        assert ahead, "what could tell whether another one follows?"
        while True:
            yield from self._run(step.steps)
            yield from self._src.space()
            if not (yield from self._src.literal(ahead, take=bool(step.between))):
                return

    # names and JSON

    def _name(self, step: Name) -> Walk[None]:
        src = self._src
        text, end = yield from src.short((*step.end, *step.before), "a name", MOST_LONG_NAME)
        own_id = ""
        if end in step.before:
            src.pos -= len(end)
        elif step.id_after and end == step.id_after:
            ends = tuple(other for other in step.end if other != end)
            own_id, _ = yield from src.short(ends, "an id", MOST_LONG_NAME)
        name = text.strip().strip("\"'")
        if step.numbered:
            own_id = name
            name = _NUMBERED.sub("", name).removeprefix("functions.")
        self._calls.named(name, bare=self._bare, own_id=own_id.strip())

    def _arguments(self, step: Arguments) -> Walk[None]:
        char = yield from self._src.ahead()
        if char != "{":
            raise Malformed(f"{char!r} where the arguments belong")
        self._calls.expect()
        yield from value(self._src, self._calls.tell, step.language)
        self._calls.whole()

    def _objects(self, step: Object) -> Walk[None]:
        """A list of calls, or calls that stand alone."""
        if (yield from self._src.after_space()) == "{":
            while (yield from self._src.after_space()) == "{":
                yield from self._object(step)
            return
        yield from self._src.char("[")
        while (yield from self._src.after_space()) != "]":
            yield from self._object(step)
            if (yield from self._src.after_space()) == ",":
                self._src.pos += 1
            elif self._src.buf[self._src.pos] != "]":
                break
        yield from self._src.char("]")
        self._settle()

    def _object(self, step: Object) -> Walk[None]:
        calls, before = self._calls, self._calls.told
        yield from self._src.char("{")
        try:
            yield from self._members(step, before)
        except Cut:
            if calls.told > before:
                self._src.rest()  # what follows the arguments says nothing of the call
            raise
        if calls.told == before:
            if not calls.name:
                raise Malformed("an object without a name")
            calls.empty()
        self._src.settle()

    def _members(self, step: Object, before: int) -> Walk[None]:
        src = self._src
        while (yield from self._src.after_space()) != "}":
            key = yield from decoded(src, MOST_LONG_NAME, "a key")
            yield from self._src.char(":")
            char = yield from self._src.after_space()
            yield from self._member(step, key, char, before)
            if self._calls.told > before:
                src.settle()
            if (yield from self._src.after_space()) == "}":
                break
            yield from self._src.char(",")
        src.pos += 1

    def _member(self, step: Object, key: str, char: str, before: int) -> Walk[None]:
        src, calls = self._src, self._calls
        done = calls.told > before
        if not done and key in step.name and char in "\"'":
            name = yield from decoded(src, MOST_LONG_NAME, "a name")
            self._named(name)
        elif not done and key in step.arguments:
            yield from self._object_arguments(char)
        elif not done and key in step.id and char in "\"'":
            calls.identified((yield from decoded(src, MOST_LONG_NAME, "an id")))
        elif not done and key == "function" and char == "{":
            src.pos += 1
            yield from self._members(step, before)
        elif not done and step.keyed and not calls.name:
            calls.named(key, bare=self._bare)
            yield from self._object_arguments(char)
        elif self._bare and not calls.name and key not in ("id", "type"):
            raise Malformed(f"{key!r} is nothing of a call")
        else:
            yield from value(src, _unheard)

    def _named(self, name: str) -> None:
        if self._calls.name:
            raise Malformed("an object with two names")
        self._calls.named(name, bare=self._bare, own_id=self._calls.own_id)
        if self._calls.gathered:
            self._calls.announce()
            self._calls.whole()

    def _object_arguments(self, char: str) -> Walk[None]:
        """Arguments as an object, as an object in a string, or as null."""
        src, calls = self._src, self._calls
        if calls.gathered:
            raise Malformed("an object with arguments twice")
        if char == "{":
            calls.expect()
            yield from value(src, calls.tell)
        elif char in "\"'":
            parts: list[str] = []
            yield from string(src, parts.append)
            inner = whole(json.loads("".join(parts)))
            if inner is None or not inner.startswith("{"):
                raise Malformed("a text that is no object where the arguments belong")
            calls.tell(inner)
        else:
            yield from self._null()
            return
        if calls.name:
            if not calls.open:
                calls.announce()
            calls.whole()
        else:
            calls.gathered = True

    def _null(self) -> Walk[None]:
        parts: list[str] = []
        yield from value(self._src, parts.append)
        if parts != ["null"]:
            raise Malformed("something that is no object where the arguments belong")

    # messages

    def _message(self, step: Message) -> Walk[None]:
        src = self._src
        header, _ = yield from src.short((step.body,), "a header", MOST_LONG_HEADER)
        header = step.header + header
        recipient = _RECIPIENT.search(header)
        if recipient:
            yield from self._message_call(step, recipient[1])
            return
        channel = _CHANNEL.search(header)
        src.settle()
        heard = self._reasoning if channel and channel[1] == "analysis" else self._content

        def tell(text: str) -> None:
            src.settle()
            heard(text)

        try:
            end = yield from src.until((*step.ends, *step.before), tell)
        except Cut:
            if rest := src.rest():
                tell(rest)
            return
        if end in step.before:
            src.pos -= len(end)
        src.settle()

    def _message_call(self, step: Message, recipient: str) -> Walk[None]:
        if recipient not in self._calls.tools and not recipient.startswith("functions."):
            raise Malformed(f"a message to {recipient[:80]!r}, which is no function")
        self._calls.named(recipient.removeprefix("functions."), bare=False)
        yield from self._src.space()
        yield from self._arguments(Arguments())
        yield from self._src.space()
        yield from self._close(Close(step.ends, optional=True))


def _unheard(text: str) -> None:
    """For a value that says nothing of the call."""
