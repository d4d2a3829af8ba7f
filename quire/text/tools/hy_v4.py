"""Hunyuan 4: the format of Hunyuan 3."""

from __future__ import annotations

from quire.text.tools.hy_v3 import FORMAT, detect

__all__ = ["FORMAT", "detect"]
