"""A JSON object after a token: GigaChat 3."""

from __future__ import annotations

from quire.text.tools.base import Dialect, Form, Mark, Object, Written

DIALECT = Dialect(
    name="gigachat3",
    forms=(
        Form(("<|function_call|>",), (Object(),)),
        Form(
            ("<|message_sep|>",),
            (Mark(("function call",)), Mark(("<|role_sep|>",)), Object()),
        ),
    ),
    written=Written(
        call='<|function_call|>{"name": "«name»", "arguments": «arguments»}',
        between="\n",
        name_in_json=True,
    ),
    signs=(("<|function_call|>",), ("function call<|role_sep|>",)),
)

detect = DIALECT.detect
