"""A JSON list in a tag in capitals: Nemotron Nano 2."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written

DIALECT = Dialect(
    name="nemotron_json",
    forms=(Form(("<TOOLCALL>",), (Object(many=True), Close(("</TOOLCALL>",)))),),
    written=Written(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="<TOOLCALL>[",
        after="]</TOOLCALL>",
        between=", ",
        name_in_json=True,
    ),
    signs=(("<TOOLCALL>",),),
)

detect = DIALECT.detect
