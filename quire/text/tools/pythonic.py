"""A list of calls as Python writes them and nothing else: Llama 3.2, ToolACE."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, PythonCallsStep, ToolFormat

FORMAT = ToolFormat(
    name="pythonic",
    syntaxes=(CallSyntax(("[",), (PythonCallsStep(),), reread_chars=1, bare=True),),
    template=CallTemplate(
        call="«name»(«params»)",
        before="[",
        after="]",
        between=", ",
        notation="python",
        param="«key»=«value»",
        param_between=", ",
    ),
    template_markers=(("[func_name1(params_name1=",),),
    excluded_markers=("<|python_start|>", "<function_calls>", "<|tool_call_start|>"),
)

detect = FORMAT.detect
