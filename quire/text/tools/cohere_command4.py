"""Command of the fourth generation: the format of the third."""

from __future__ import annotations

from quire.text.tools.cohere_command3 import FORMAT, detect

__all__ = ["FORMAT", "detect"]
