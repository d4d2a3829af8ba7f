"""Tags with a prefix in a section of calls: Step 3."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Label, Many, Mark, Name, Params, Written

DIALECT = Dialect(
    name="step3",
    forms=(
        Form(
            ("<｜tool_calls_begin｜>",),
            (
                Many(
                    (
                        Mark(("<｜tool_call_begin｜>",)),
                        Label(("<｜tool_sep｜>",)),
                        Mark(('<steptml:invoke name="',)),
                        Name(end=('"',)),
                        Mark((">",)),
                        Params(
                            key_open='<steptml:parameter name="',
                            key_close='"',
                            value_open=">",
                            value_close="</steptml:parameter>",
                            close=("</steptml:invoke>",),
                            outer=("<｜tool_call_end｜>",),
                        ),
                        Close(("<｜tool_call_end｜>",)),
                    )
                ),
                Close(("<｜tool_calls_end｜>",)),
            ),
        ),
    ),
    written=Written(
        call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="«name»">«params»'
        "</steptml:invoke><｜tool_call_end｜>",
        before="<｜tool_calls_begin｜>",
        after="<｜tool_calls_end｜>",
        values="params",
        param='<steptml:parameter name="«key»">«value»</steptml:parameter>',
    ),
    signs=(("<｜tool_calls_begin｜>",), ("steptml:invoke",)),
)

detect = DIALECT.detect
