"""Images and videos of GLM-4.5V: as GLM-4.1V's."""

from __future__ import annotations

from quire.media.processors import glm4v

Processor = glm4v.Processor
