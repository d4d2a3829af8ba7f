"""The tags of Qwen 3 Coder without line breaks, values as they stand: MiMo."""

from __future__ import annotations

from quire.text.tools._tag_calls import function_calls
from quire.text.tools.base import CallTemplate, ToolFormat

FORMAT = ToolFormat(
    name="mimo",
    syntaxes=(function_calls("tool_call"),),
    template=CallTemplate(
        call="<tool_call><function=«name»>«params»</function></tool_call>",
        notation="params",
        param="<parameter=«key»>«value»</parameter>",
    ),
)

detect = FORMAT.detect
