"""The tags of Qwen 3 Coder in a tag of its own: Seed-OSS."""

from __future__ import annotations

from quire.text.tools.base import (
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    ParamsStep,
    RepeatStep,
    ToolFormat,
)

FORMAT = ToolFormat(
    name="seed_oss",
    syntaxes=(
        CallSyntax(
            ("<seed:tool_call>",),
            (
                RepeatStep(
                    (
                        LiteralStep(("<function=",)),
                        NameStep(end=(">",)),
                        ParamsStep(
                            key_open="<parameter=",
                            key_close=">",
                            value_close="</parameter>",
                            close=("</function>",),
                            outer=("</seed:tool_call>",),
                        ),
                    )
                ),
                CloseStep(("</seed:tool_call>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call="<seed:tool_call>\n<function=«name»>\n«params»</function>\n</seed:tool_call>",
        between="\n",
        notation="params",
        param="<parameter=«key»>«value»</parameter>\n",
    ),
    template_markers=(("<seed:tool_call>",),),
)

detect = FORMAT.detect
