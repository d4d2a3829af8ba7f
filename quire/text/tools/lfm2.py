"""A list of calls as Python writes them, between tokens: LFM2."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, PythonCalls, Written

DIALECT = Dialect(
    name="lfm2",
    forms=(Form(("<|tool_call_start|>",), (PythonCalls(), Close(("<|tool_call_end|>",)))),),
    written=Written(
        call="«name»(«params»)",
        before="<|tool_call_start|>[",
        after="]<|tool_call_end|>",
        between=", ",
        values="python",
        param="«key»=«value»",
        param_between=", ",
    ),
    signs=(("<|tool_call_start|>",),),
)

detect = DIALECT.detect
