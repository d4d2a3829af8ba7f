"""Messages for functions in channels: harmony, which gpt-oss writes. Its analysis is reasoning."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, HarmonyMessageStep, ToolFormat

ENDS = ("<|end|>", "<|call|>", "<|return|>")

FORMAT = ToolFormat(
    name="openai",
    channels="openai_gptoss",
    syntaxes=(
        CallSyntax(("<|start|>",), (HarmonyMessageStep("<|message|>", ENDS, ("<|start|>",)),)),
        CallSyntax(
            ("<|channel|>",),
            (HarmonyMessageStep("<|message|>", ENDS, ("<|start|>",), header="<|channel|>"),),
        ),
    ),
    template=CallTemplate(
        call="<|channel|>commentary to=functions.«name» <|constrain|>json<|message|>«arguments»"
        "<|call|>",
        between="<|start|>assistant",
    ),
    template_markers=(("<|channel|>", "<|message|>", "functions"),),
    ignored=ENDS,
)

detect = FORMAT.detect
