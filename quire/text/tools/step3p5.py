"""Step 3.5: the format of Qwen 3 Coder."""

from __future__ import annotations

from quire.text.tools.qwen3_coder import FORMAT, detect

__all__ = ["FORMAT", "detect"]
