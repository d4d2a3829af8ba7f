"""Qwen 3, when it writes calls as JSON: the format of Hermes."""

from __future__ import annotations

from quire.text.tools.hermes import FORMAT, detect

__all__ = ["FORMAT", "detect"]
