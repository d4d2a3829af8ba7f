"""JSON objects in tool_call tags: Hermes, Qwen 2.5 and 3, and many that were tuned on them."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="hermes",
    syntaxes=(CallSyntax(("<tool_call>",), (ObjectStep(many=True), CloseStep(("</tool_call>",)))),),
    template=CallTemplate(
        call='<tool_call>\n{"name": "«name»", "arguments": «arguments»}\n</tool_call>',
        between="\n",
        name_in_json=True,
    ),
    template_markers=(("<tool_call>", "arguments"),),
    excluded_markers=("<function=", "<arg_key>", "<|tool_call|>", "<tool_sep>", "]<]minimax[>["),
)

detect = FORMAT.detect
