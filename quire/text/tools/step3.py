"""Tags with a prefix in a section of calls: Step 3."""

from __future__ import annotations

from quire.text.tools.base import (
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    ParamsStep,
    RepeatStep,
    SkipStep,
    ToolFormat,
)

FORMAT = ToolFormat(
    name="step3",
    syntaxes=(
        CallSyntax(
            ("<｜tool_calls_begin｜>",),
            (
                RepeatStep(
                    (
                        LiteralStep(("<｜tool_call_begin｜>",)),
                        SkipStep(("<｜tool_sep｜>",)),
                        LiteralStep(('<steptml:invoke name="',)),
                        NameStep(end=('"',)),
                        LiteralStep((">",)),
                        ParamsStep(
                            key_open='<steptml:parameter name="',
                            key_close='"',
                            value_open=">",
                            value_close="</steptml:parameter>",
                            close=("</steptml:invoke>",),
                            outer=("<｜tool_call_end｜>",),
                        ),
                        CloseStep(("<｜tool_call_end｜>",)),
                    )
                ),
                CloseStep(("<｜tool_calls_end｜>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="«name»">«params»'
        "</steptml:invoke><｜tool_call_end｜>",
        before="<｜tool_calls_begin｜>",
        after="<｜tool_calls_end｜>",
        notation="params",
        param='<steptml:parameter name="«key»">«value»</steptml:parameter>',
    ),
    template_markers=(("<｜tool_calls_begin｜>",), ("steptml:invoke",)),
)

detect = FORMAT.detect
