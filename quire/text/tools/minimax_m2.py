"""A tag for each call and for each parameter in an outer tag: MiniMax M2."""

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
    name="minimax_m2",
    syntaxes=(
        CallSyntax(
            ("<minimax:tool_call>",),
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
                            outer=("</minimax:tool_call>",),
                        ),
                    )
                ),
                CloseStep(("</minimax:tool_call>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call='<invoke name="«name»">\n«params»</invoke>',
        before="<minimax:tool_call>\n",
        after="\n</minimax:tool_call>",
        between="\n",
        notation="params",
        param='<parameter name="«key»">«value»</parameter>\n',
    ),
    template_markers=(("minimax:tool_call",),),
    excluded_markers=("]<]minimax[>[",),
)

detect = FORMAT.detect
