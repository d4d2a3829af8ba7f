"""JSON objects in tool_call tags: Hermes, Qwen 2.5 and 3, and many that were tuned on them."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written

DIALECT = Dialect(
    name="hermes",
    forms=(Form(("<tool_call>",), (Object(many=True), Close(("</tool_call>",)))),),
    written=Written(
        call='<tool_call>\n{"name": "«name»", "arguments": «arguments»}\n</tool_call>',
        between="\n",
        name_in_json=True,
    ),
    signs=(("<tool_call>", "arguments"),),
    without=("<function=", "<arg_key>", "<|tool_call|>", "<tool_sep>"),
)

detect = DIALECT.detect
