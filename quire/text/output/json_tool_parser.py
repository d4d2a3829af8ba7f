"""Parses calls that a grammar forces as plain JSON, whatever the format of the model.

    one function, named      {"city": "Rome"}                                     Arguments
    one or more of several   [{"name": "f", "parameters": {"city": "Rome"}}]      LIST

The grammar is in quire.tool_grammar.call_grammar.
"""

from __future__ import annotations

import json

from quire.text.output.parsed_text import ParsedCallDelta, ParsedPiece, ToolCallOutcome
from quire.text.tools._text_cursor import SPACES
from quire.text.tools.base import CallSyntax, CallTemplate, IdSource, ObjectStep, ToolFormat
from quire.text.tools.parser import new_hex_id

JSON_LIST_FORMAT = ToolFormat(
    name="json",
    syntaxes=(CallSyntax(("[",), (ObjectStep(many=True),), reread_chars=1, bare=True),),
    template=CallTemplate(
        call='{"name": "«name»", "parameters": «arguments»}',
        before="[",
        after="]",
        between=", ",
        name_in_json=True,
    ),
)
"""A JSON list and nothing else."""


class JsonArgumentsParser:
    """A reader of texts that are, as a whole, the arguments of one function."""

    def __init__(self, name: str, ids: IdSource = new_hex_id) -> None:
        self._name = name
        self._ids = ids
        self._text: list[str] = []

    def push(self, text: str, *, last: bool) -> list[ParsedPiece]:
        """See StreamingParser."""
        pieces: list[ParsedPiece] = []
        if not self._text:
            text = text.lstrip(SPACES)
            if text:
                pieces.append(
                    ParsedPiece(call=ParsedCallDelta(0, f"chatcmpl-tool-{self._ids()}", self._name))
                )
        if text:
            self._text.append(text)
            pieces.append(ParsedPiece(call=ParsedCallDelta(0, arguments=text)))
        if last and self._text:
            pieces.append(ParsedPiece(call=ParsedCallDelta(0, outcome=self._outcome())))
        return pieces

    def _outcome(self) -> ToolCallOutcome:
        try:
            whole = json.loads("".join(self._text))
        except (ValueError, RecursionError):
            return "cut"
        return "whole" if isinstance(whole, dict) else "broken"
