"""A function tag with a tag for each parameter: Qwen 3 Coder and later Qwen."""

from __future__ import annotations

from quire.text.tools.base import (
    Arguments,
    Close,
    Dialect,
    Either,
    Form,
    Many,
    Mark,
    Name,
    Params,
    Step,
    Written,
)

PARAMS = Params(
    key_open="<parameter=",
    key_close=">",
    value_close="</parameter>",
    close=("</function>",),
    outer=("</tool_call>",),
    trim=True,
)
FUNCTION: tuple[Step, ...] = (
    Name(end=(">",)),
    Either(("{",), (Arguments(), Close(("</function>",))), (PARAMS,)),
)

DIALECT = Dialect(
    name="qwen3_coder",
    forms=(
        Form(
            ("<tool_call>",),
            (Many((Mark(("<function=",)), *FUNCTION)), Close(("</tool_call>",))),
        ),
        Form(("<function=",), (*FUNCTION, Close(("</tool_call>",), optional=True))),
    ),
    written=Written(
        call="<tool_call>\n<function=«name»>\n«params»</function>\n</tool_call>",
        between="\n",
        values="params",
        param="<parameter=«key»>\n«value»\n</parameter>\n",
    ),
    signs=(("<function=", "<parameter=", "<tool_call>"),),
    without=("<seed:tool_call>",),
)

detect = DIALECT.detect
