"""The format of gpt-oss by the name of its format."""

from __future__ import annotations

from quire.text.tools.openai import FORMAT, detect

__all__ = ["FORMAT", "detect"]
