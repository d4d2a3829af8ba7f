"""Qwen 3, when it writes calls as JSON: the dialect of Hermes."""

from __future__ import annotations

from quire.text.tools.hermes import FORMAT, detect

__all__ = ["FORMAT", "detect"]
