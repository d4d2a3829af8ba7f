"""Images of NVLM-D: tiles as InternVL has them, each behind its name as text."""

from __future__ import annotations

from quire.media.processor import Expansion, ProcessedMedia
from quire.media.processors import internvl_chat
from quire.media.processors._pixels import tiles_of

THUMBNAIL = "<tile_global_thumbnail>"


class Processor(internvl_chat.Processor):
    @property
    def image_id(self) -> int:
        return self.token("<|vision_pad|>")

    def item_text(self, media: ProcessedMedia, index: int, following: str = "") -> str:
        """Return it with the first name, which is no token and joins what is before it."""
        first = _names(tiles_of(media, "tiles", self.per_tile))[0]
        return f"<Image>{first}{self.placeholder('image', index)}</Image>"

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        ids: list[int] = []
        runs: list[tuple[int, int]] = []
        for i, name in enumerate(_names(tiles_of(media, "tiles", self.per_tile))):
            if i:
                ids += self.files.tokenize(name)
            runs.append((len(ids), self.per_tile))
            ids += [self.image_id] * self.per_tile
        return Expansion(tuple(ids), tuple(runs))


def _names(tiles: int) -> list[str]:
    return [*(f"<tile_{i}>" for i in range(1, tiles)), THUMBNAIL]
