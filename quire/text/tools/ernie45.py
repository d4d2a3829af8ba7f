"""Ernie 4.5: the format of Hermes."""

from __future__ import annotations

from quire.text.tools.hermes import FORMAT, detect

__all__ = ["FORMAT", "detect"]
