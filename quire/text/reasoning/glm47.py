"""GLM 4.7: as glm45."""

from quire.text.reasoning.base import never_detected as detect
from quire.text.reasoning.glm45 import FORMAT

__all__ = ["FORMAT", "detect"]
