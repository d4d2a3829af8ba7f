"""The tags of Qwen 3 Coder in a tag of its own: Seed-OSS."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Many, Mark, Name, Params, Written

DIALECT = Dialect(
    name="seed_oss",
    forms=(
        Form(
            ("<seed:tool_call>",),
            (
                Many(
                    (
                        Mark(("<function=",)),
                        Name(end=(">",)),
                        Params(
                            key_open="<parameter=",
                            key_close=">",
                            value_close="</parameter>",
                            close=("</function>",),
                            outer=("</seed:tool_call>",),
                        ),
                    )
                ),
                Close(("</seed:tool_call>",)),
            ),
        ),
    ),
    written=Written(
        call="<seed:tool_call>\n<function=«name»>\n«params»</function>\n</seed:tool_call>",
        between="\n",
        values="params",
        param="<parameter=«key»>«value»</parameter>\n",
    ),
    signs=(("<seed:tool_call>",),),
)

detect = DIALECT.detect
