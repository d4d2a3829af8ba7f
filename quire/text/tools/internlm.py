"""A JSON object between tokens: InternLM 2 and 3."""

from __future__ import annotations

from quire.text.tools.base import (
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    ObjectStep,
    ToolFormat,
)

FORMAT = ToolFormat(
    name="internlm",
    syntaxes=(
        CallSyntax(
            ("<|action_start|>",),
            (LiteralStep(("<|plugin|>",)), ObjectStep(), CloseStep(("<|action_end|>",))),
        ),
    ),
    template=CallTemplate(
        call='<|action_start|><|plugin|>{"name": "«name»", "parameters": «arguments»}'
        "<|action_end|>",
        between="\n",
        name_in_json=True,
    ),
    template_markers=(("<|plugin|>",),),
)

detect = FORMAT.detect
