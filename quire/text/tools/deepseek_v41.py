"""As DeepSeek V3.2, in another outer tag and with a space: DeepSeek V4.1."""

from __future__ import annotations

from quire.text.tools._dsml import dsml_format

FORMAT = dsml_format("deepseek_v41", ("calls",), space=" ", sign="｜DSML｜ calls")

detect = FORMAT.detect
