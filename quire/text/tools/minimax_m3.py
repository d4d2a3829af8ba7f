"""Nested elements, each tag behind a mark, in an outer element: MiniMax M3."""

from __future__ import annotations

from quire.text.tools.base import (
    CallSyntax,
    CallTemplate,
    CloseStep,
    ElementsStep,
    LiteralStep,
    NameStep,
    RepeatStep,
    SyntaxStep,
    ToolFormat,
)

MARK = "]<]minimax[>["
END = f"{MARK}</tool_call>"
INVOKE = f'{MARK}<invoke name="'
CALL: tuple[SyntaxStep, ...] = (
    NameStep(end=('"',)),
    LiteralStep((">",)),
    ElementsStep(MARK, close=(f"{MARK}</invoke>",)),
)

FORMAT = ToolFormat(
    name="minimax_m3",
    syntaxes=(
        CallSyntax(
            (f"{MARK}<tool_call>",),
            (RepeatStep((LiteralStep((INVOKE,)), *CALL)), CloseStep((END,))),
        ),
        CallSyntax((INVOKE,), (*CALL, CloseStep((END,), optional=True)), declared_only=True),
    ),
    template=CallTemplate(
        call=f'{INVOKE}«name»">«params»{MARK}</invoke>',
        before=f"{MARK}<tool_call>\n",
        after=f"\n{END}",
        between="\n",
        notation="elements",
        param=f"{MARK}<«key»>«value»{MARK}</«key»>",
    ),
    template_markers=((MARK,),),
)

detect = FORMAT.detect
