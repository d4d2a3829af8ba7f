"""Step 5: as deepseek_r1."""

from quire.text.reasoning.base import never_detected as detect
from quire.text.reasoning.deepseek_r1 import FORMAT

__all__ = ["FORMAT", "detect"]
