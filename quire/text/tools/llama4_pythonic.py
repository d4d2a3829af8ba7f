"""A list of calls as Python writes them, between tokens or bare: Llama 4."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, PythonCalls, Written

END = Close(("<|python_end|>",), optional=True)

DIALECT = Dialect(
    name="llama4_pythonic",
    forms=(
        Form(("<|python_start|>",), (PythonCalls(), END)),
        Form(("[",), (PythonCalls(), END), keep=1, bare=True),
    ),
    written=Written(
        call="«name»(«params»)",
        before="<|python_start|>[",
        after="]<|python_end|>",
        between=", ",
        values="python",
        param="«key»=«value»",
        param_between=", ",
    ),
    signs=(("<|python_start|>",), ("[func_name1(param1=",)),
)

detect = DIALECT.detect
