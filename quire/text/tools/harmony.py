"""The dialect of gpt-oss by the name of its format."""

from __future__ import annotations

from quire.text.tools.openai import DIALECT, detect

__all__ = ["DIALECT", "detect"]
