"""Calls as Python writes them, one to a line, in a tag: Olmo 3."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, PythonCalls, Written

DIALECT = Dialect(
    name="olmo3",
    forms=(Form(("<function_calls>",), (PythonCalls(lines=True), Close(("</function_calls>",)))),),
    written=Written(
        call="«name»(«params»)",
        before="<function_calls>\n",
        after="\n</function_calls>",
        between="\n",
        values="python",
        param="«key»=«value»",
        param_between=", ",
    ),
    signs=(("<function_calls>",),),
    without=("<invoke name=",),
)

detect = DIALECT.detect
