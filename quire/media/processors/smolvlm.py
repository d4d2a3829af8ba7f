"""Images of SmolVLM: as of Idefics 3."""

from quire.media.processors import idefics3

Processor = idefics3.Processor
