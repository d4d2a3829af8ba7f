"""A JSON list in a tag: Jamba."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="jamba",
    syntaxes=(
        CallSyntax(
            ("<tool_calls>",),
            (
                ObjectStep(many=True),
                CloseStep(("</tool_calls>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="<tool_calls>[\n    ",
        after="\n]</tool_calls>",
        between=",\n    ",
        name_in_json=True,
    ),
    template_markers=(("<tool_calls>",),),
    excluded_markers=("<tool_sep>",),
)

detect = FORMAT.detect
