"""Arguments in braces, strings between tokens: FunctionGemma."""

from __future__ import annotations

from quire.text.tools._value_parsers import ValueSyntax
from quire.text.tools.base import (
    ArgumentsStep,
    BranchStep,
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    ToolFormat,
)

QUOTE = "<escape>"
CALL = "call:"
BRACES = ValueSyntax(quotes=(QUOTE,), bare=True)

FORMAT = ToolFormat(
    name="functiongemma",
    syntaxes=(
        CallSyntax(
            ("<start_function_call>",),
            (
                BranchStep(
                    (CALL, f":{CALL}"),
                    (LiteralStep((CALL, f":{CALL}")), NameStep(before=("{",))),
                    (NameStep(),),
                ),
                ArgumentsStep(BRACES),
                CloseStep(("<end_function_call>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call="<start_function_call>call:«name»«arguments»<end_function_call>",
        notation="braces",
        quote=QUOTE,
    ),
    template_markers=(("<start_function_call>",),),
)

detect = FORMAT.detect
