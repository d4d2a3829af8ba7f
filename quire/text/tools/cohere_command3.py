"""A JSON list of actions between tokens: Command R7B, A and later."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="cohere_command3",
    syntaxes=(
        CallSyntax(
            ("<|START_ACTION|>",),
            (
                ObjectStep(name=("tool_name",), many=True),
                CloseStep(("<|END_ACTION|>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call='{"tool_call_id": "«place»", "tool_name": "«name»", "parameters": «arguments»}',
        before="<|START_ACTION|>[\n    ",
        after="\n]<|END_ACTION|>",
        between=",\n    ",
        name_in_json=True,
    ),
    template_markers=(("<|START_ACTION|>",),),
)

detect = FORMAT.detect
