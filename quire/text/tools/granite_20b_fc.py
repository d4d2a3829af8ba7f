"""JSON objects after a tag: Granite 20B function calling."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="granite_20b_fc",
    syntaxes=(
        CallSyntax(
            ("<function_call>",),
            (
                ObjectStep(many=True),
                CloseStep(("</function_call>",), optional=True),
            ),
        ),
    ),
    template=CallTemplate(
        call='<function_call> {"name": "«name»", "arguments": «arguments»}',
        between="\n",
        name_in_json=True,
    ),
    template_markers=(("<function_call>",),),
)

detect = FORMAT.detect
