"""A tag for each call and for each parameter: MiniCPM 5."""

from __future__ import annotations

from quire.text.tools.base import Dialect, Form, Mark, Name, Params, Written

DIALECT = Dialect(
    name="minicpm5",
    forms=(
        Form(
            ('<function name="',),
            (
                Name(end=('"',)),
                Mark((">",)),
                Params(
                    key_open='<param name="',
                    key_close='"',
                    value_open=">",
                    value_close="</param>",
                    close=("</function>",),
                ),
            ),
        ),
    ),
    written=Written(
        call='<function name="«name»">«params»</function>',
        between="\n",
        values="params",
        param='<param name="«key»">«value»</param>',
    ),
    signs=(("<function name=", "<param name="),),
)

detect = DIALECT.detect
