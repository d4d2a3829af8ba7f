"""Bare JSON objects, after a token or at the beginning of a line: Llama 3.1 to 3.3."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, ObjectStep, RepeatStep, ToolFormat

CALLS = RepeatStep((ObjectStep(),), separators=(";",))

FORMAT = ToolFormat(
    name="llama3_json",
    syntaxes=(
        CallSyntax(("<|python_tag|>",), (CALLS,)),
        CallSyntax(("{",), (CALLS,), reread_chars=1, bare=True, inline=True),
    ),
    template=CallTemplate(
        call='{"name": "«name»", "parameters": «arguments»}',
        between="; ",
        name_in_json=True,
    ),
    template_markers=(("<|python_tag|>",), ("Respond in the format {", "parameters")),
    excluded_markers=("<|python_start|>", "[func_name1("),
)

detect = FORMAT.detect
