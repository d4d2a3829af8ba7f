"""The format of gpt-oss by the name of the model."""

from __future__ import annotations

from quire.text.tools.openai import FORMAT, detect

__all__ = ["FORMAT", "detect"]
