"""The tags of Qwen 3 Coder without line breaks, values as they stand: MiMo."""

from __future__ import annotations

from quire.text.tools.base import (
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    ParamsStep,
    RepeatStep,
    ToolFormat,
)

FORMAT = ToolFormat(
    name="mimo",
    syntaxes=(
        CallSyntax(
            ("<tool_call>",),
            (
                RepeatStep(
                    (
                        LiteralStep(("<function=",)),
                        NameStep(end=(">",)),
                        ParamsStep(
                            key_open="<parameter=",
                            key_close=">",
                            value_close="</parameter>",
                            close=("</function>",),
                            outer=("</tool_call>",),
                        ),
                    )
                ),
                CloseStep(("</tool_call>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call="<tool_call><function=«name»>«params»</function></tool_call>",
        notation="params",
        param="<parameter=«key»>«value»</parameter>",
    ),
)

detect = FORMAT.detect
