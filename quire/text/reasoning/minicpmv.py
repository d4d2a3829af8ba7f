"""MiniCPM-V: as qwen3."""

from quire.text.reasoning.base import never_detected as detect
from quire.text.reasoning.qwen3 import FORMAT

__all__ = ["FORMAT", "detect"]
