"""Images and videos of GLM-OCR: those of GLM-4.1V."""

from __future__ import annotations

from quire.media.processors.glm4v import Processor

__all__ = ["Processor"]
