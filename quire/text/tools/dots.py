"""A tag for each call and for each parameter, or JSON, in an outer tag: dots."""

from __future__ import annotations

from quire.text.tools.base import (
    BranchStep,
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    ObjectStep,
    ParamsStep,
    RepeatStep,
    ToolFormat,
)

INVOKES = RepeatStep(
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
)

FORMAT = ToolFormat(
    name="dots",
    declared_only=True,
    syntaxes=(
        CallSyntax(
            ("<dots_function_call>",),
            (
                BranchStep(("{", "["), (ObjectStep(many=True),), (INVOKES,)),
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
