"""Tags opened and closed by tokens, each value with its type: Kimi K3."""

from __future__ import annotations

from quire.text.tools.base import (
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    ParamsStep,
    RepeatStep,
    SkipStep,
    ToolFormat,
)

FORMAT = ToolFormat(
    name="kimi_k3",
    syntaxes=(
        CallSyntax(
            ("<|open|>tools<|sep|>",),
            (
                RepeatStep(
                    (
                        LiteralStep(('<|open|>call tool="',)),
                        NameStep(end=('"',)),
                        SkipStep(("<|sep|>",)),
                        ParamsStep(
                            key_open='<|open|>argument key="',
                            key_close='"',
                            value_open="<|sep|>",
                            value_close="<|close|>argument<|sep|>",
                            close=("<|close|>call<|sep|>",),
                            outer=("<|close|>tools<|sep|>",),
                            text_mark='type="string"',
                            json_mark='type="',
                        ),
                    )
                ),
                CloseStep(("<|close|>tools<|sep|>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call='<|open|>call tool="«name»" index="«place»"<|sep|>«params»<|close|>call<|sep|>',
        before="<|open|>tools<|sep|>",
        after="<|close|>tools<|sep|>",
        notation="params",
        param='<|open|>argument key="«key»" type="«type»"<|sep|>«value»<|close|>argument<|sep|>',
        text_attribute="string",
        json_attribute="json",
    ),
    template_markers=(("<|open|>", "<|sep|>", "tools"),),
)

detect = FORMAT.detect
