"""A JSON object between tokens: Inkling."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="inkling",
    syntaxes=(
        CallSyntax(
            ("<|content_invoke_tool_json|>",),
            (
                ObjectStep(arguments=("args", "arguments")),
                CloseStep(("<|end_message|>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call='<|content_invoke_tool_json|>{"name": "«name»", "args": «arguments»}<|end_message|>',
        name_in_json=True,
    ),
    template_markers=(("<|content_invoke_tool_json|>",),),
)

detect = FORMAT.detect
