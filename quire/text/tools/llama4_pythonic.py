"""A list of calls as Python writes them, between tokens or bare: Llama 4."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, PythonCallsStep, ToolFormat

END = CloseStep(("<|python_end|>",), optional=True)

FORMAT = ToolFormat(
    name="llama4_pythonic",
    syntaxes=(
        CallSyntax(("<|python_start|>",), (PythonCallsStep(), END)),
        CallSyntax(("[",), (PythonCallsStep(), END), reread_chars=1, bare=True),
    ),
    template=CallTemplate(
        call="«name»(«params»)",
        before="<|python_start|>[",
        after="]<|python_end|>",
        between=", ",
        notation="python",
        param="«key»=«value»",
        param_between=", ",
    ),
    template_markers=(("<|python_start|>",), ("[func_name1(param1=",)),
)

detect = FORMAT.detect
