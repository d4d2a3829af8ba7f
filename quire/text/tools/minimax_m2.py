"""A tag for each call and for each parameter in an outer tag: MiniMax M2."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Many, Mark, Name, Params, Written

DIALECT = Dialect(
    name="minimax_m2",
    forms=(
        Form(
            ("<minimax:tool_call>",),
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
                            outer=("</minimax:tool_call>",),
                        ),
                    )
                ),
                Close(("</minimax:tool_call>",)),
            ),
        ),
    ),
    written=Written(
        call='<invoke name="«name»">\n«params»</invoke>',
        before="<minimax:tool_call>\n",
        after="\n</minimax:tool_call>",
        between="\n",
        values="params",
        param='<parameter name="«key»">«value»</parameter>\n',
    ),
    signs=(("minimax:tool_call",),),
    without=("]<]minimax[>[",),
)

detect = DIALECT.detect
