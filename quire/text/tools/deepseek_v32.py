"""Tags with a marker of their own, each value marked as text or JSON: DeepSeek V3.2."""

from __future__ import annotations

from quire.text.tools._dsml import dsml_format

FORMAT = dsml_format("deepseek_v32", ("function_calls",), sign="function_calls")

detect = FORMAT.detect
