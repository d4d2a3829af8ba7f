"""Llama 4, when it is asked for JSON: the dialect of Llama 3."""

from __future__ import annotations

from quire.text.tools.llama3_json import DIALECT, detect

__all__ = ["DIALECT", "detect"]
