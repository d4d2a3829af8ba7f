"""Calls as Python writes them, one to a line, in a tag: Olmo 3."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, PythonCallsStep, ToolFormat

FORMAT = ToolFormat(
    name="olmo3",
    syntaxes=(
        CallSyntax(
            ("<function_calls>",), (PythonCallsStep(lines=True), CloseStep(("</function_calls>",)))
        ),
    ),
    template=CallTemplate(
        call="«name»(«params»)",
        before="<function_calls>\n",
        after="\n</function_calls>",
        between="\n",
        notation="python",
        param="«key»=«value»",
        param_between=", ",
    ),
    template_markers=(("<function_calls>",),),
    excluded_markers=("<invoke name=",),
)

detect = FORMAT.detect
