"""Step 5: as deepseek_r1."""

from quire.text.reasoning.base import never as detect
from quire.text.reasoning.deepseek_r1 import DIALECT

__all__ = ["DIALECT", "detect"]
