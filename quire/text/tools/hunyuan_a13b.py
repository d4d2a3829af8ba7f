"""Hunyuan A13B: the format of Jamba."""

from __future__ import annotations

from quire.text.tools.jamba import FORMAT, detect

__all__ = ["FORMAT", "detect"]
