"""Muse Glimmer: as muse."""

from quire.text.reasoning.base import never_detected as detect
from quire.text.reasoning.muse import FORMAT

__all__ = ["FORMAT", "detect"]
