"""A tag for each call and for each parameter in an outer tag: dots."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Many, Mark, Name, Params, Written

DIALECT = Dialect(
    name="dots",
    forms=(
        Form(
            ("<dots_function_call>",),
            (
                Many(
                    (
                        Mark(('<invoke name="',)),
                        Name(end=('"',)),
                        Mark((">",)),
                        Params(
                            key_open='<parameter name="',
                            key_close='"',
                            value_open=">",
                            value_close="</parameter>",
                            close=("</invoke>",),
                            outer=("</dots_function_call>",),
                        ),
                    )
                ),
                Close(("</dots_function_call>",)),
            ),
        ),
    ),
    written=Written(
        call='<invoke name="«name»">\n«params»</invoke>',
        before="<dots_function_call>\n",
        after="\n</dots_function_call>",
        between="\n",
        values="params",
        param='<parameter name="«key»">«value»</parameter>\n',
    ),
    signs=(("<dots_function_call>",),),
    without=("]<]minimax[>[",),
)

detect = DIALECT.detect
