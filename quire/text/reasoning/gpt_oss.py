"""The model's own name: as openai_gptoss."""

from quire.text.reasoning.base import never_detected as detect
from quire.text.reasoning.openai_gptoss import FORMAT

__all__ = ["FORMAT", "detect"]
