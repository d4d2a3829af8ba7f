"""JSON objects in tags of their own: LongCat."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written

DIALECT = Dialect(
    name="longcat",
    forms=(
        Form(
            ("<longcat_tool_call>",),
            (
                Object(many=True),
                Close(("</longcat_tool_call>",)),
            ),
        ),
    ),
    written=Written(
        call='<longcat_tool_call>\n{"name": "«name»", "arguments": «arguments»}'
        "\n</longcat_tool_call>",
        between="\n",
        name_in_json=True,
    ),
    signs=(("<longcat_tool_call>",),),
)

detect = DIALECT.detect
