"""A JSON list after a token: Granite 3."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written

DIALECT = Dialect(
    name="granite",
    forms=(
        Form(
            ("<|tool_call|>", "<tool_call>"),
            (
                Object(many=True),
                Close(("</tool_call>",), optional=True),
            ),
        ),
    ),
    written=Written(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="<|tool_call|>[",
        after="]",
        between=", ",
        name_in_json=True,
    ),
    signs=(("<|tool_call|>",),),
    without=("<|/tool|>",),
)

detect = DIALECT.detect
