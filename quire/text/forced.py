"""Calls that a model writes as plain JSON because it is made to, whatever its own dialect is.

    one function, named      {"city": "Rome"}                                     Arguments
    one or more of several   [{"name": "f", "parameters": {"city": "Rome"}}]      LIST

Not here: what makes a model write them (quire.binding.calls).
"""

from __future__ import annotations

import json

from quire.text.speech import Call, Ending, Piece
from quire.text.tools._source import SPACES
from quire.text.tools.base import Dialect, Form, Ids, Object, Written
from quire.text.tools.machine import fresh_hex

LIST = Dialect(
    name="json",
    forms=(Form(("[",), (Object(many=True),), keep=1, bare=True),),
    written=Written(
        call='{"name": "«name»", "parameters": «arguments»}',
        before="[",
        after="]",
        between=", ",
        name_in_json=True,
    ),
)
"""A JSON list and nothing else."""


class Arguments:
    """A reader of texts that are, as a whole, the arguments of one function."""

    def __init__(self, name: str, ids: Ids = fresh_hex) -> None:
        self._name = name
        self._ids = ids
        self._text: list[str] = []

    def push(self, text: str, *, last: bool) -> list[Piece]:
        """See Reader."""
        pieces: list[Piece] = []
        if not self._text:
            text = text.lstrip(SPACES)
            if text:
                pieces.append(Piece(call=Call(0, f"chatcmpl-tool-{self._ids()}", self._name)))
        if text:
            self._text.append(text)
            pieces.append(Piece(call=Call(0, arguments=text)))
        if last and self._text:
            pieces.append(Piece(call=Call(0, end=self._end())))
        return pieces

    def _end(self) -> Ending:
        try:
            whole = json.loads("".join(self._text))
        except (ValueError, RecursionError):
            return "cut"
        return "whole" if isinstance(whole, dict) else "broken"
