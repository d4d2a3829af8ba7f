"""A JSON list after a token: Granite 3."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="granite",
    syntaxes=(
        CallSyntax(
            ("<|tool_call|>", "<tool_call>"),
            (
                ObjectStep(many=True),
                CloseStep(("</tool_call>",), optional=True),
            ),
        ),
    ),
    template=CallTemplate(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="<|tool_call|>[",
        after="]",
        between=", ",
        name_in_json=True,
    ),
    template_markers=(("<|tool_call|>",),),
    excluded_markers=("<|/tool|>",),
)

detect = FORMAT.detect
