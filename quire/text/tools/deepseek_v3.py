"""A section of calls, arguments in a fenced block of JSON: DeepSeek V3 and R1."""

from __future__ import annotations

from quire.text.tools.base import (
    ArgumentsStep,
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    RepeatStep,
    SkipStep,
    ToolFormat,
)

FORMAT = ToolFormat(
    name="deepseek_v3",
    syntaxes=(
        CallSyntax(
            ("<｜tool▁calls▁begin｜>",),
            (
                RepeatStep(
                    (
                        LiteralStep(("<｜tool▁call▁begin｜>",)),
                        SkipStep(("<｜tool▁sep｜>",)),
                        NameStep(end=("\n",), before=("```json",)),
                        LiteralStep(("```json",)),
                        ArgumentsStep(),
                        CloseStep(("```",)),
                        CloseStep(("<｜tool▁call▁end｜>",)),
                    )
                ),
                CloseStep(("<｜tool▁calls▁end｜>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>«name»\n```json\n«arguments»\n```"
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
        between="\n",
    ),
    template_markers=(("<｜tool▁calls▁begin｜>", "```json"),),
)

detect = FORMAT.detect
