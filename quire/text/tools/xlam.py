"""A bare JSON list, or one in a fenced block or after a tag: xLAM."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="xlam",
    syntaxes=(
        CallSyntax(("[TOOL_CALLS]",), (ObjectStep(many=True),)),
        CallSyntax(
            ("<tool_call>",), (ObjectStep(many=True), CloseStep(("</tool_call>",), optional=True))
        ),
        CallSyntax(("```json", "```"), (ObjectStep(many=True), CloseStep(("```",))), bare=True),
        CallSyntax(("[", "{"), (ObjectStep(many=True),), reread_chars=1, bare=True, inline=True),
    ),
    template=CallTemplate(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="[",
        after="]",
        between=", ",
        name_in_json=True,
    ),
    template_markers=(("tool_call_name", "additional parallel tool calls"),),
)

detect = FORMAT.detect
