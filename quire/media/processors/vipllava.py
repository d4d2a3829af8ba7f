"""Images of ViP-LLaVA: as LLaVA 1.5's."""

from __future__ import annotations

from quire.media.processors import llava

Processor = llava.Processor
