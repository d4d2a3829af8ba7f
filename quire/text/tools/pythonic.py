"""A list of calls as Python writes them and nothing else: Llama 3.2, ToolACE."""

from __future__ import annotations

from quire.text.tools.base import Dialect, Form, PythonCalls, Written

DIALECT = Dialect(
    name="pythonic",
    forms=(Form(("[",), (PythonCalls(),), keep=1, bare=True),),
    written=Written(
        call="«name»(«params»)",
        before="[",
        after="]",
        between=", ",
        values="python",
        param="«key»=«value»",
        param_between=", ",
    ),
    signs=(("[func_name1(params_name1=",),),
    without=("<|python_start|>", "<function_calls>", "<|tool_call_start|>"),
)

detect = DIALECT.detect
