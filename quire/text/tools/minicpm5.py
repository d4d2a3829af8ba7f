"""A tag for each call and for each parameter: MiniCPM 5."""

from __future__ import annotations

from quire.text.tools.base import (
    CallSyntax,
    CallTemplate,
    LiteralStep,
    NameStep,
    ParamsStep,
    ToolFormat,
)

FORMAT = ToolFormat(
    name="minicpm5",
    declared_only=True,
    syntaxes=(
        CallSyntax(
            ('<function name="', '<functionname="', '<function\u0120name="'),
            (
                NameStep(end=('"',)),
                LiteralStep((">",)),
                ParamsStep(
                    key_open='<param name="',
                    key_close='"',
                    value_open=">",
                    value_close="</param>",
                    close=("</function>",),
                    key_variants=('<paramname="', '<param\u0120name="'),
                    cdata=True,
                ),
            ),
        ),
    ),
    template=CallTemplate(
        call='<function name="«name»">«params»</function>',
        between="\n",
        notation="params",
        param='<param name="«key»">«value»</param>',
    ),
    template_markers=(("<function name=", "<param name="),),
)

detect = FORMAT.detect
