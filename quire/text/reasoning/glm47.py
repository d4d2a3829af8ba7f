"""GLM 4.7: as glm45."""

from quire.text.reasoning.base import never as detect
from quire.text.reasoning.glm45 import DIALECT

__all__ = ["DIALECT", "detect"]
