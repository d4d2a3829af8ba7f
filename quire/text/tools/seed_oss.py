"""The tags of Qwen 3 Coder in a tag of its own: Seed-OSS."""

from __future__ import annotations

from quire.text.tools._tag_calls import function_calls
from quire.text.tools.base import CallTemplate, ToolFormat

FORMAT = ToolFormat(
    name="seed_oss",
    syntaxes=(function_calls("seed:tool_call"),),
    template=CallTemplate(
        call="<seed:tool_call>\n<function=«name»>\n«params»</function>\n</seed:tool_call>",
        between="\n",
        notation="params",
        param="<parameter=«key»>«value»</parameter>\n",
    ),
    template_markers=(("<seed:tool_call>",),),
)

detect = FORMAT.detect
