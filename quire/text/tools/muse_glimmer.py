"""Muse Glimmer: the format of Muse."""

from __future__ import annotations

from quire.text.tools.muse import FORMAT, detect

__all__ = ["FORMAT", "detect"]
