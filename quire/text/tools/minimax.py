"""MiniMax by the name of the family: JSON objects in a tag as M1 writes them, or the tags of M2."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written
from quire.text.tools.minimax_m2 import DIALECT as M2

DIALECT = Dialect(
    name="minimax",
    forms=(
        Form(("<tool_calls>",), (Object(many=True), Close(("</tool_calls>",)))),
        *M2.forms,
    ),
    written=Written(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="<tool_calls>\n",
        after="\n</tool_calls>",
        between="\n",
        name_in_json=True,
    ),
)

detect = DIALECT.detect
