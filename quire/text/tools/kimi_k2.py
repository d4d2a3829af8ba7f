"""A section of calls, each with an id that holds the name: Kimi K2."""

from __future__ import annotations

from quire.text.tools.base import (
    ArgumentsStep,
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    RepeatStep,
    ToolFormat,
)

FORMAT = ToolFormat(
    name="kimi_k2",
    syntaxes=(
        CallSyntax(
            ("<|tool_calls_section_begin|>",),
            (
                RepeatStep(
                    (
                        LiteralStep(("<|tool_call_begin|>",)),
                        NameStep(end=("<|tool_call_argument_begin|>",), numbered=True),
                        ArgumentsStep(),
                        CloseStep(("<|tool_call_end|>",)),
                    )
                ),
                CloseStep(("<|tool_calls_section_end|>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call="<|tool_call_begin|>functions.«name»:«place»<|tool_call_argument_begin|>«arguments»"
        "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    template_markers=(("<|tool_calls_section_begin|>",),),
    id_style="numbered",
)

detect = FORMAT.detect
