"""A JSON object after a token: GigaChat 3."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, LiteralStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="gigachat3",
    syntaxes=(
        CallSyntax(("<|function_call|>",), (ObjectStep(),)),
        CallSyntax(
            ("<|message_sep|>",),
            (LiteralStep(("function call",)), LiteralStep(("<|role_sep|>",)), ObjectStep()),
        ),
    ),
    template=CallTemplate(
        call='<|function_call|>{"name": "«name»", "arguments": «arguments»}',
        between="\n",
        name_in_json=True,
    ),
    template_markers=(("<|function_call|>",), ("function call<|role_sep|>",)),
)

detect = FORMAT.detect
