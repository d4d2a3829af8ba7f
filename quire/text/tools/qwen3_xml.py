"""The format of Qwen 3 Coder by its other name."""

from __future__ import annotations

from quire.text.tools.qwen3_coder import FORMAT, detect

__all__ = ["FORMAT", "detect"]
