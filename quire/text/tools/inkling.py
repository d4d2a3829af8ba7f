"""A JSON object between tokens: Inkling."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written

DIALECT = Dialect(
    name="inkling",
    forms=(
        Form(
            ("<|content_invoke_tool_json|>",),
            (
                Object(arguments=("args", "arguments")),
                Close(("<|end_message|>",)),
            ),
        ),
    ),
    written=Written(
        call='<|content_invoke_tool_json|>{"name": "«name»", "args": «arguments»}<|end_message|>',
        name_in_json=True,
    ),
    signs=(("<|content_invoke_tool_json|>",),),
)

detect = DIALECT.detect
