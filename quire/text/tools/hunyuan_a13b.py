"""Hunyuan A13B: the dialect of Jamba."""

from __future__ import annotations

from quire.text.tools.jamba import DIALECT, detect

__all__ = ["DIALECT", "detect"]
