"""A name and pairs of key and value in tags, in a section: Hunyuan 3 and 4."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Many, Mark, Name, Params, Written

DIALECT = Dialect(
    name="hy_v3",
    forms=(
        Form(
            ("<tool_calls>",),
            (
                Many(
                    (
                        Mark(("<tool_call>",)),
                        Name(end=("<tool_sep>",)),
                        Params(
                            key_open="<arg_key>",
                            key_close="</arg_key>",
                            value_open="<arg_value>",
                            value_close="</arg_value>",
                            close=("</tool_call>",),
                            outer=("</tool_calls>",),
                        ),
                    )
                ),
                Close(("</tool_calls>",)),
            ),
        ),
    ),
    written=Written(
        call="<tool_call>«name»<tool_sep>\n«params»</tool_call>",
        before="<tool_calls>\n",
        after="\n</tool_calls>",
        between="\n",
        values="params",
        param="<arg_key>«key»</arg_key>\n<arg_value>«value»</arg_value>\n",
    ),
    signs=(("<tool_calls>", "<tool_sep>"),),
)

detect = DIALECT.detect
