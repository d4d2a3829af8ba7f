"""The model's own name: as openai_gptoss."""

from quire.text.reasoning.base import never as detect
from quire.text.reasoning.openai_gptoss import DIALECT

__all__ = ["DIALECT", "detect"]
