"""JSON objects after a tag: Granite 20B function calling."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written

DIALECT = Dialect(
    name="granite_20b_fc",
    forms=(
        Form(
            ("<function_call>",),
            (
                Object(many=True),
                Close(("</function_call>",), optional=True),
            ),
        ),
    ),
    written=Written(
        call='<function_call> {"name": "«name»", "arguments": «arguments»}',
        between="\n",
        name_in_json=True,
    ),
    signs=(("<function_call>",),),
)

detect = DIALECT.detect
