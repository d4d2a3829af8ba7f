"""A name and pairs of key and value in tags: GLM 4.5 to 4.7."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, NameStep, ParamsStep, ToolFormat

FORMAT = ToolFormat(
    name="glm45",
    syntaxes=(
        CallSyntax(
            ("<tool_call>",),
            (
                NameStep(end=("\n",), before=("<arg_key>", "</tool_call>")),
                ParamsStep(
                    key_open="<arg_key>",
                    key_close="</arg_key>",
                    value_open="<arg_value>",
                    value_close="</arg_value>",
                    close=("</tool_call>",),
                ),
            ),
        ),
    ),
    template=CallTemplate(
        call="<tool_call>«name»\n«params»</tool_call>",
        between="\n",
        notation="params",
        param="<arg_key>«key»</arg_key>\n<arg_value>«value»</arg_value>\n",
    ),
    template_markers=(("<arg_key>", "<tool_call>"),),
    excluded_markers=("<tool_sep>",),
)

detect = FORMAT.detect
