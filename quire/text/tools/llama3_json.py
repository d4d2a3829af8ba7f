"""Bare JSON objects, after a token or at the beginning of a line: Llama 3.1 to 3.3."""

from __future__ import annotations

from quire.text.tools.base import Dialect, Form, Many, Object, Written

CALLS = Many((Object(),), between=(";",))

DIALECT = Dialect(
    name="llama3_json",
    forms=(
        Form(("<|python_tag|>",), (CALLS,)),
        Form(("{",), (CALLS,), keep=1, bare=True),
    ),
    written=Written(
        call='{"name": "«name»", "parameters": «arguments»}',
        between="; ",
        name_in_json=True,
    ),
    signs=(("<|python_tag|>",), ("Respond in the format {", "parameters")),
    without=("<|python_start|>", "[func_name1("),
)

detect = DIALECT.detect
