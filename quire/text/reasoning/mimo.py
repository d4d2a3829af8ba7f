"""MiMo: as qwen3."""

from quire.text.reasoning.base import never as detect
from quire.text.reasoning.qwen3 import DIALECT

__all__ = ["DIALECT", "detect"]
