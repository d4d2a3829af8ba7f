"""Arguments in braces, strings between tokens: Gemma 4."""

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

QUOTE = '<|"|>'
CALL = "call:"
BRACES = ValueSyntax(quotes=(QUOTE,), bare=True)

FORMAT = ToolFormat(
    name="gemma4",
    syntaxes=(
        CallSyntax(
            ("<|tool_call>",),
            (
                BranchStep(
                    (CALL, f":{CALL}"),
                    (LiteralStep((CALL, f":{CALL}")), NameStep(before=("{",))),
                    (NameStep(),),
                ),
                ArgumentsStep(BRACES),
                CloseStep(("<tool_call|>", "<turn|>")),
            ),
        ),
        CallSyntax(
            (CALL,),
            (
                NameStep(),
                ArgumentsStep(BRACES),
                CloseStep(("<tool_call|>",), optional=True),
            ),
            bare=True,
        ),
    ),
    template=CallTemplate(
        call="<|tool_call>call:«name»«arguments»<tool_call|>",
        notation="braces",
        quote=QUOTE,
    ),
    template_markers=(("<|tool_call>",),),
)

detect = FORMAT.detect
