"""A function tag with a tag for each parameter: Qwen 3 Coder and later Qwen."""

from __future__ import annotations

from quire.text.tools.base import (
    ArgumentsStep,
    BranchStep,
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    ParamsStep,
    RepeatStep,
    SyntaxStep,
    ToolFormat,
)

PARAMS = ParamsStep(
    key_open="<parameter=",
    key_close=">",
    value_close="</parameter>",
    close=("</function>",),
    outer=("</tool_call>",),
    trim=True,
)
FUNCTION: tuple[SyntaxStep, ...] = (
    NameStep(end=(">",)),
    BranchStep(("{",), (ArgumentsStep(), CloseStep(("</function>",))), (PARAMS,)),
)

FORMAT = ToolFormat(
    name="qwen3_coder",
    syntaxes=(
        CallSyntax(
            ("<tool_call>",),
            (RepeatStep((LiteralStep(("<function=",)), *FUNCTION)), CloseStep(("</tool_call>",))),
        ),
        CallSyntax(("<function=",), (*FUNCTION, CloseStep(("</tool_call>",), optional=True))),
    ),
    template=CallTemplate(
        call="<tool_call>\n<function=«name»>\n«params»</function>\n</tool_call>",
        between="\n",
        notation="params",
        param="<parameter=«key»>\n«value»\n</parameter>\n",
    ),
    template_markers=(("<function=", "<parameter=", "<tool_call>"),),
    excluded_markers=("<seed:tool_call>",),
)

detect = FORMAT.detect
