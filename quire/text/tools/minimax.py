"""The dialect of MiniMax M2 by a shorter name."""

from __future__ import annotations

from quire.text.tools.minimax_m2 import DIALECT, detect

__all__ = ["DIALECT", "detect"]
