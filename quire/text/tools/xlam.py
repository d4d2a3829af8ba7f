"""A bare JSON list, or one in a fenced block or after a tag: xLAM."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written

DIALECT = Dialect(
    name="xlam",
    forms=(
        Form(("[TOOL_CALLS]",), (Object(many=True),)),
        Form(("<tool_call>",), (Object(many=True), Close(("</tool_call>",), optional=True))),
        Form(("```json", "```"), (Object(many=True), Close(("```",))), bare=True),
        Form(("[", "{"), (Object(many=True),), keep=1, bare=True),
    ),
    written=Written(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="[",
        after="]",
        between=", ",
        name_in_json=True,
    ),
    signs=(("tool_call_name", "additional parallel tool calls"),),
)

detect = DIALECT.detect
