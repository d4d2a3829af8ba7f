"""A name and pairs of key and value in tags: GLM 4.5 to 4.7."""

from __future__ import annotations

from quire.text.tools.base import Dialect, Form, Name, Params, Written

DIALECT = Dialect(
    name="glm45",
    forms=(
        Form(
            ("<tool_call>",),
            (
                Name(end=("\n",), before=("<arg_key>", "</tool_call>")),
                Params(
                    key_open="<arg_key>",
                    key_close="</arg_key>",
                    value_open="<arg_value>",
                    value_close="</arg_value>",
                    close=("</tool_call>",),
                ),
            ),
        ),
    ),
    written=Written(
        call="<tool_call>«name»\n«params»</tool_call>",
        between="\n",
        values="params",
        param="<arg_key>«key»</arg_key>\n<arg_value>«value»</arg_value>\n",
    ),
    signs=(("<arg_key>", "<tool_call>"),),
    without=("<tool_sep>",),
)

detect = DIALECT.detect
