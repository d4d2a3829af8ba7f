"""A name and pairs of key and value in tags, in a section: Hunyuan 3 and 4."""

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
    name="hy_v3",
    syntaxes=(
        CallSyntax(
            ("<tool_calls>",),
            (
                RepeatStep(
                    (
                        LiteralStep(("<tool_call>",)),
                        NameStep(end=("<tool_sep>",), before=("<arg_key>", "</tool_call>")),
                        ParamsStep(
                            key_open="<arg_key>",
                            key_close="</arg_key>",
                            value_open="<arg_value>",
                            value_close="</arg_value>",
                            close=("</tool_call>",),
                            outer=("</tool_calls>",),
                        ),
                    )
                ),
                CloseStep(("</tool_calls>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call="<tool_call>«name»<tool_sep>\n«params»</tool_call>",
        before="<tool_calls>\n",
        after="\n</tool_calls>",
        between="\n",
        notation="params",
        param="<arg_key>«key»</arg_key>\n<arg_value>«value»</arg_value>\n",
    ),
    template_markers=(("<tool_calls>", "<tool_sep>"),),
)

detect = FORMAT.detect
