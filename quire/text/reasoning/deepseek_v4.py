"""DeepSeek V4: as deepseek_v3."""

from quire.text.reasoning.base import never as detect
from quire.text.reasoning.deepseek_v3 import DIALECT

__all__ = ["DIALECT", "detect"]
