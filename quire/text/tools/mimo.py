"""The tags of Qwen 3 Coder without line breaks, values as they stand: MiMo."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Many, Mark, Name, Params, Written

DIALECT = Dialect(
    name="mimo",
    forms=(
        Form(
            ("<tool_call>",),
            (
                Many(
                    (
                        Mark(("<function=",)),
                        Name(end=(">",)),
                        Params(
                            key_open="<parameter=",
                            key_close=">",
                            value_close="</parameter>",
                            close=("</function>",),
                            outer=("</tool_call>",),
                        ),
                    )
                ),
                Close(("</tool_call>",)),
            ),
        ),
    ),
    written=Written(
        call="<tool_call><function=«name»>«params»</function></tool_call>",
        values="params",
        param="<parameter=«key»>«value»</parameter>",
    ),
)

detect = DIALECT.detect
