"""The calls of one text as they are told: numbered, named, given ids, and never told too early.

A call is told when its name is known and its arguments have begun as arguments must. From then on
what is read of them is told at once. With `eager` off a call is told when it is whole, or not at
all: then even markup that breaks in the middle of the arguments comes back as content.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping

from quire.text.speech import Call, Ending, Piece
from quire.text.tools._source import Malformed, Source
from quire.text.tools.base import Dialect, Ids, Tool

MOST_LONG_NAME = 512
_NO_NAME = frozenset(" \t\r\n<>{}()[]\"'`,;|")
_ALPHABET = string.ascii_letters + string.digits


class Calls:
    """What was told of calls so far, and the one being read."""

    def __init__(
        self,
        src: Source,
        emit: Callable[[Piece], None],
        dialect: Dialect,
        tools: Mapping[str, Tool],
        *,
        parallel: bool,
        eager: bool,
        ids: Ids,
    ) -> None:
        self._src = src
        self._emit = emit
        self._dialect = dialect
        self.tools = tools
        self._most = None if parallel else 1
        self._eager = eager
        self._ids = ids
        self.told = 0
        """Calls that were told whole."""
        self.begun = 0
        """Calls that were announced."""
        self.open = False
        """A call was announced and is not whole yet."""
        self.gathered = False
        """The arguments of a call without a name so far are all read."""
        self._expecting = False
        self._name = ""
        self._id = ""
        self._parts: list[str] = []

    @property
    def name(self) -> str:
        """Of the call being read; "" while it is not known."""
        return self._name

    @property
    def own_id(self) -> str:
        """The id that the model gave the call being read."""
        return self._id

    @property
    def tool(self) -> Tool | None:
        """What was declared of the call being read."""
        return self.tools.get(self._name)

    def named(self, name: str, *, bare: bool, own_id: str = "") -> None:
        """The name of the call being read. own_id: the id that the model gave it."""
        name = name.strip()
        if name not in self.tools:
            if not name or len(name) > MOST_LONG_NAME or not _NO_NAME.isdisjoint(name):
                raise Malformed(f"{name[:80]!r} is not the name of a function")
            if bare and self.tools:
                raise Malformed(f"{name!r} is not a declared function")
        self._name = name
        self._id = own_id

    def identified(self, own_id: str) -> None:
        """The id that the model gave the call being read."""
        self._id = own_id

    def expect(self) -> None:
        """An object follows that will be the arguments: announced when it proves to be one."""
        self._expecting = True

    def announce(self) -> None:
        """The call's arguments have begun."""
        assert self._name, "a call without a name"
        self.open = True
        self.begun += 1
        if self._eager:
            self._say(Call(self.begun - 1, self._fresh_id(), self._name))
            self._src.settle()
            kept, self._parts = self._parts, []
            if kept:
                self.tell("".join(kept))

    def tell(self, text: str) -> None:
        """More of the arguments, of a call that is open or whose name is still to come."""
        if self.open and self._eager:
            self._say(Call(self.begun - 1, arguments=text))
            self._src.settle()
            return
        self._parts.append(text)
        proved = self._expecting and text in (": ", "}")  # a key is whole, or there is none
        if proved and self._name and not self.open:
            self.announce()

    def whole(self) -> None:
        """The call is complete."""
        if self._eager:
            self._say(Call(self.begun - 1, end="whole"))
        else:
            text = "".join(self._parts)
            self._say(Call(self.begun - 1, self._fresh_id(), self._name, text, "whole"))
        self.told += 1
        self._src.settle()
        self._forget()

    def empty(self) -> None:
        """The call said nothing of arguments."""
        tool = self.tool
        if tool is None or tool.needs:
            raise Malformed(f"a call of {self._name!r} without arguments")
        self._parts.clear()
        self.announce()
        self.tell("{}")
        self.whole()

    def stop(self, end: Ending) -> bool:
        """The call being read goes no further. False if nothing was told of it."""
        told = self.open and self._eager
        if told:
            self._say(Call(self.begun - 1, end=end))
        elif self.open:
            self.begun -= 1
        self._forget()
        return told

    def _forget(self) -> None:
        self.open = self.gathered = self._expecting = False
        self._name = self._id = ""
        self._parts = []

    def _say(self, call: Call) -> None:
        if self._most is None or call.place < self._most:
            self._emit(Piece(call=call))

    @property
    def unsaid(self) -> int:
        """Calls that were read and not told because only one may be."""
        return 0 if self._most is None else max(self.told - self._most, 0)

    def _fresh_id(self) -> str:
        place, kind = self.begun - 1, self._dialect.ids
        if kind == "numbered":
            return self._id or f"functions.{self._name}:{place}"
        if kind == "nine":
            own = self._id
            good = len(own) == 9 and own.isascii() and own.isalnum()
            return own if good else _nine(self._ids())
        return f"chatcmpl-tool-{self._ids()}"


def _nine(hexes: str) -> str:
    """Nine letters and digits made of a long hex text."""
    number = int(hexes, 16)
    chars = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHABET))
        chars.append(_ALPHABET[digit])
    return "".join(chars)
