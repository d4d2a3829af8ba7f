"""Ling 3: the format of GLM 4.5."""

from __future__ import annotations

from quire.text.tools.glm45 import FORMAT, detect

__all__ = ["FORMAT", "detect"]
