"""A section of calls, name and arguments with a token between: DeepSeek V3.1."""

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
    name="deepseek_v31",
    syntaxes=(
        CallSyntax(
            ("<｜tool▁calls▁begin｜>",),
            (
                RepeatStep(
                    (
                        LiteralStep(("<｜tool▁call▁begin｜>",)),
                        NameStep(end=("<｜tool▁sep｜>",)),
                        ArgumentsStep(),
                        CloseStep(("<｜tool▁call▁end｜>",)),
                    )
                ),
                CloseStep(("<｜tool▁calls▁end｜>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call="<｜tool▁call▁begin｜>«name»<｜tool▁sep｜>«arguments»<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    template_markers=(("<｜tool▁calls▁begin｜>",),),
    excluded_markers=("```json",),
)

detect = FORMAT.detect
