"""A tag for each call and for each parameter in an outer tag: dots."""

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
    name="dots",
    syntaxes=(
        CallSyntax(
            ("<dots_function_call>",),
            (
                RepeatStep(
                    (
                        LiteralStep(('<invoke name="',)),
                        NameStep(end=('"',)),
                        LiteralStep((">",)),
                        ParamsStep(
                            key_open='<parameter name="',
                            key_close='"',
                            value_open=">",
                            value_close="</parameter>",
                            close=("</invoke>",),
                            outer=("</dots_function_call>",),
                        ),
                    )
                ),
                CloseStep(("</dots_function_call>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call='<invoke name="«name»">\n«params»</invoke>',
        before="<dots_function_call>\n",
        after="\n</dots_function_call>",
        between="\n",
        notation="params",
        param='<parameter name="«key»">«value»</parameter>\n',
    ),
    template_markers=(("<dots_function_call>",),),
    excluded_markers=("]<]minimax[>[",),
)

detect = FORMAT.detect
