"""Poolside: as deepseek_v3."""

from quire.text.reasoning.base import never_detected as detect
from quire.text.reasoning.deepseek_v3 import FORMAT

__all__ = ["FORMAT", "detect"]
