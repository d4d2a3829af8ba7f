"""The dialect of Qwen 3 Coder by its other name."""

from __future__ import annotations

from quire.text.tools.qwen3_coder import DIALECT, detect

__all__ = ["DIALECT", "detect"]
