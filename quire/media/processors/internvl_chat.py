"""Images of InternVL in the form of the hub. Its settings are in config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors import internvl
from quire.media.processors._pixels import scale_shift

NORMALIZED = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
KWARGS = {
    "dynamic_image_size": "crop_to_patches",
    "min_dynamic_patch": "min_patches",
    "max_dynamic_patch": "max_patches",
}
"""Fields of config.json, which are also options of a request -> ours."""


class Processor(internvl.Processor):
    modalities = ("image",)
    text_placeholders = True
    allowed_kwargs: ClassVar = {
        "dynamic_image_size": KwargRange(bool),
        "min_dynamic_patch": KwargRange(int, 1, internvl.MAX_TILES),
        "max_dynamic_patch": KwargRange(int, 1, internvl.MAX_TILES),
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        config = files.config
        vision = config.get("vision_config") or {}
        side = int(config.get("force_image_size") or vision.get("image_size") or 448)
        self.settings |= NORMALIZED | {"size": {"height": side, "width": side}}
        self.settings |= self.own_names(config)
        self.settings["use_thumbnail"] = config.get("use_thumbnail", True)
        self.scale_shift = scale_shift(self.settings)
        self.per_tile = self.tile_rows()

    @staticmethod
    def own_names(given: Settings) -> Settings:
        """Return settings under our names."""
        return {ours: given[one] for one, ours in KWARGS.items() if given.get(one) is not None}

    @property
    def image_id(self) -> int:
        return self.token("<IMG_CONTEXT>")

    def placeholder(self, modality: str, index: int) -> str:
        return "<image>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        return super().process(media, self.own_names(kwargs))

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        return replace(super().expand(media, index), replaces=())
