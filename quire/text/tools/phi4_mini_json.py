"""The format of Phi 4 mini by its other name."""

from __future__ import annotations

from quire.text.tools.phi4_mini import FORMAT, detect

__all__ = ["FORMAT", "detect"]
