"""JSON objects in tags of their own: LongCat."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="longcat",
    syntaxes=(
        CallSyntax(
            ("<longcat_tool_call>",),
            (
                ObjectStep(many=True),
                CloseStep(("</longcat_tool_call>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call='<longcat_tool_call>\n{"name": "«name»", "arguments": «arguments»}'
        "\n</longcat_tool_call>",
        between="\n",
        name_in_json=True,
    ),
    template_markers=(("<longcat_tool_call>",),),
)

detect = FORMAT.detect
