"""The format of FunctionGemma by a shorter name."""

from __future__ import annotations

from quire.text.tools.functiongemma import FORMAT, detect

__all__ = ["FORMAT", "detect"]
