"""A JSON list in a tag: Jamba."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written

DIALECT = Dialect(
    name="jamba",
    forms=(
        Form(
            ("<tool_calls>",),
            (
                Object(many=True),
                Close(("</tool_calls>",)),
            ),
        ),
    ),
    written=Written(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="<tool_calls>[\n    ",
        after="\n]</tool_calls>",
        between=",\n    ",
        name_in_json=True,
    ),
    signs=(("<tool_calls>",),),
    without=("<tool_sep>",),
)

detect = DIALECT.detect
