"""Emits the calls of one text: indexed, named, with ids, and never too early.

A call is emitted when its name is known and its arguments have begun as arguments must. From then
on its arguments are emitted as they are parsed. With `eager` off only complete calls are emitted:
then even markup that breaks in the middle of the arguments becomes content again.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping

from quire.text.output.parsed_text import ParsedCallDelta, ParsedPiece, ToolCallOutcome
from quire.text.tools._text_cursor import MalformedMarkup, TextCursor
from quire.text.tools.base import IdSource, Tool, ToolFormat

MAX_NAME_CHARS = 512
_FORBIDDEN_IN_NAME = frozenset(" \t\r\n<>{}()[]\"'`,;|")
_ALPHABET = string.ascii_letters + string.digits


class CallEmitter:
    """The calls emitted so far, and the one being parsed."""

    def __init__(
        self,
        src: TextCursor,
        emit: Callable[[ParsedPiece], None],
        tool_format: ToolFormat,
        tools: Mapping[str, Tool],
        *,
        parallel: bool,
        eager: bool,
        ids: IdSource,
    ) -> None:
        self._cursor = src
        self._emit = emit
        self._format = tool_format
        self.tools = tools
        self._max_calls = None if parallel else 1
        self._eager = eager
        self._ids = ids
        self.completed = 0
        """Complete calls that were emitted."""
        self.started = 0
        """Calls that were announced."""
        self.open = False
        """A call was announced and is not complete yet."""
        self.arguments_complete = False
        """All arguments are parsed of a call that has no name yet."""
        self._expecting = False
        self._name = ""
        self._id = ""
        self._parts: list[str] = []

    @property
    def name(self) -> str:
        """Name of the call that is being parsed; "" while unknown."""
        return self._name

    @property
    def model_call_id(self) -> str:
        """The id that the model gave the call being read."""
        return self._id

    @property
    def declared_tool(self) -> Tool | None:
        """The declaration of the function being called."""
        return self.tools.get(self._name)

    def set_name(self, name: str, *, declared_only: bool, own_id: str = "") -> None:
        """The name of the call being parsed. own_id: the id that the model gave it.

        declared_only: of the syntax; a format may demand it too. Raises MalformedMarkup.
        """
        name = name.strip()
        if name not in self.tools:
            if not name or len(name) > MAX_NAME_CHARS or not _FORBIDDEN_IN_NAME.isdisjoint(name):
                raise MalformedMarkup(f"{name[:80]!r} is not the name of a function")
            if (declared_only or self._format.declared_only) and self.tools:
                raise MalformedMarkup(f"{name!r} is not a declared function")
        self._name = name
        self._id = own_id

    def set_id(self, own_id: str) -> None:
        """The id that the model gave the call being read."""
        self._id = own_id

    def expect_object(self) -> None:
        """An object follows that will be the arguments: announced when it proves to be one."""
        self._expecting = True

    def begin_call(self) -> None:
        """The call's arguments have begun."""
        assert self._name, "a call without a name"
        self.open = True
        self.started += 1
        if self._eager:
            self._emit_delta(ParsedCallDelta(self.started - 1, self._new_id(), self._name))
            self._cursor.commit()
            kept, self._parts = self._parts, []
            if kept:
                self.emit_arguments("".join(kept))

    def emit_arguments(self, text: str) -> None:
        """A further part of the arguments of an open call, or of one without a name yet."""
        if self.open and self._eager:
            self._emit_delta(ParsedCallDelta(self.started - 1, arguments=text))
            self._cursor.commit()
            return
        self._parts.append(text)
        proved = self._expecting and text in (": ", "}")  # a key is whole, or there is none
        if proved and self._name and not self.open:
            self.begin_call()

    def complete_call(self) -> None:
        """The call is complete."""
        if self._eager:
            self._emit_delta(ParsedCallDelta(self.started - 1, outcome="whole"))
        else:
            text = "".join(self._parts)
            self._emit_delta(
                ParsedCallDelta(self.started - 1, self._new_id(), self._name, text, "whole")
            )
        self.completed += 1
        self._cursor.commit()
        self._reset()

    def complete_without_arguments(self) -> None:
        """The call has no arguments."""
        declared_tool = self.declared_tool
        if declared_tool is None or declared_tool.has_required:
            raise MalformedMarkup(f"a call of {self._name!r} without arguments")
        self._parts.clear()
        self.begin_call()
        self.emit_arguments("{}")
        self.complete_call()

    def abandon_call(self, end: ToolCallOutcome) -> bool:
        """End the call being parsed. Returns False if nothing of it was emitted."""
        completed = self.open and self._eager
        if completed:
            self._emit_delta(ParsedCallDelta(self.started - 1, outcome=end))
        elif self.open:
            self.started -= 1
        self._reset()
        return completed

    def _reset(self) -> None:
        self.open = self.arguments_complete = self._expecting = False
        self._name = self._id = ""
        self._parts = []

    def _emit_delta(self, call: ParsedCallDelta) -> None:
        if self._max_calls is None or call.index < self._max_calls:
            self._emit(ParsedPiece(call=call))

    @property
    def suppressed(self) -> int:
        """Calls that were parsed and not emitted because only one is allowed."""
        return 0 if self._max_calls is None else max(self.completed - self._max_calls, 0)

    def _new_id(self) -> str:
        place, kind = self.started - 1, self._format.id_style
        if kind == "numbered":
            return self._id or f"functions.{self._name}:{place}"
        if kind == "nine":
            own = self._id
            good = len(own) == 9 and own.isascii() and own.isalnum()
            return own if good else _nine_chars(self._ids())
        return f"chatcmpl-tool-{self._ids()}"


def _nine_chars(hexes: str) -> str:
    """Nine letters and digits made of a long hex text."""
    number = int(hexes, 16)
    chars = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHABET))
        chars.append(_ALPHABET[digit])
    return "".join(chars)
