"""Llama 4, if prompted for JSON: the format of Llama 3."""

from __future__ import annotations

from quire.text.tools.llama3_json import FORMAT, detect

__all__ = ["FORMAT", "detect"]
