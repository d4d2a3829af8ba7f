"""A list of calls as Python writes them, between tokens: LFM2."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, PythonCallsStep, ToolFormat

FORMAT = ToolFormat(
    name="lfm2",
    syntaxes=(
        CallSyntax(
            ("<|tool_call_start|>",), (PythonCallsStep(), CloseStep(("<|tool_call_end|>",)))
        ),
    ),
    template=CallTemplate(
        call="«name»(«params»)",
        before="<|tool_call_start|>[",
        after="]<|tool_call_end|>",
        between=", ",
        notation="python",
        param="«key»=«value»",
        param_between=", ",
    ),
    template_markers=(("<|tool_call_start|>",),),
)

detect = FORMAT.detect
