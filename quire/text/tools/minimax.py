"""MiniMax by the name of the family: JSON objects in a tag as M1 writes them, or the tags of M2."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat
from quire.text.tools.minimax_m2 import FORMAT as M2

FORMAT = ToolFormat(
    name="minimax",
    syntaxes=(
        CallSyntax(("<tool_calls>",), (ObjectStep(many=True), CloseStep(("</tool_calls>",)))),
        *M2.syntaxes,
    ),
    template=CallTemplate(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="<tool_calls>\n",
        after="\n</tool_calls>",
        between="\n",
        name_in_json=True,
    ),
)

detect = FORMAT.detect
