"""A tag for each call and for each parameter in an outer tag, in messages: Muse."""

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
    name="muse",
    channels="muse",
    syntaxes=(
        CallSyntax(
            ("<atem:function_calls>",),
            (
                RepeatStep(
                    (
                        LiteralStep(('<atem:invoke name="',)),
                        NameStep(end=('"',)),
                        LiteralStep((">",)),
                        ParamsStep(
                            key_open='<atem:parameter name="',
                            key_close='"',
                            value_open=">",
                            value_close="</atem:parameter>",
                            close=("</atem:invoke>",),
                            outer=("</atem:function_calls>",),
                        ),
                    )
                ),
                CloseStep(("</atem:function_calls>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call='<atem:invoke name="«name»">\n«params»</atem:invoke>',
        before="<atem:function_calls>\n",
        after="\n</atem:function_calls>",
        between="\n",
        notation="params",
        param='<atem:parameter name="«key»">«value»</atem:parameter>\n',
    ),
    template_markers=(("<atem:function_calls>",),),
)

detect = FORMAT.detect
