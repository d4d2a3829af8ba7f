"""Hunyuan 4: as hy_v3."""

from quire.text.reasoning.base import never_detected as detect
from quire.text.reasoning.hy_v3 import FORMAT

__all__ = ["FORMAT", "detect"]
