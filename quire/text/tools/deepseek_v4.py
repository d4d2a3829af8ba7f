"""As DeepSeek V3.2, in another outer tag: DeepSeek V4."""

from __future__ import annotations

from quire.text.tools._dsml import dsml_format

FORMAT = dsml_format("deepseek_v4", ("tool_calls", "toolcalls", "tool"), sign="tool_calls")

detect = FORMAT.detect
