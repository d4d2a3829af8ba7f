"""Images of SigLIP: as those of CLIP, resized to a square."""

from __future__ import annotations

from quire.media.processors import clip
from quire.media.processors._pixels import SIGLIP


class Processor(clip.Processor):
    defaults = SIGLIP
