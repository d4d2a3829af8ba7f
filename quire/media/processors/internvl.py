"""Images of InternVL of transformers: up to 12 tiles and a thumbnail; a frame is one tile."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from quire.errors import ConfigError
from quire.media.image_ops import to_tensor
from quire.media.processor import (
    DecodedMedia,
    DecodedVideo,
    Expansion,
    KwargRange,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import (
    CLIP,
    ImageProcessor,
    pixels_of,
    resized_and_cropped,
    scale_shift,
    size_of,
    tiles_of,
)
from quire.media.processors._tiles import tiles_with_thumbnail

MAX_TILES = 12
"""Of a request; a checkpoint may state more."""
TILES = CLIP | {
    "size": {"height": 384, "width": 384},
    "do_center_crop": False,
    "min_patches": 1,
    "max_patches": MAX_TILES,
}


class Processor(ImageProcessor):
    modalities: tuple[Modality, ...] = ("image", "video")
    defaults = TILES
    takes_embeds = True
    allowed_kwargs: ClassVar = {
        "crop_to_patches": KwargRange(bool),
        "min_patches": KwargRange(int, 1, MAX_TILES),
        "max_patches": KwargRange(int, 1, MAX_TILES),
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.settings["crop_to_patches"] = True  # whatever the file of the image processor states
        self.per_tile = self.tile_rows()

    def tile_rows(self) -> int:
        """Rows of a tile."""
        vision: dict[str, Any] = self.files.config.get("vision_config") or {}
        patch = vision.get("patch_size") or 14
        patch = patch if isinstance(patch, int) else patch[0]
        ratio = float(self.files.config.get("downsample_ratio") or 0.5)
        return int((size_of(self.settings)[0] // patch * ratio) ** 2)

    def placeholder(self, modality: str, index: int) -> str:
        return "<video>" if modality == "video" else "<IMG_CONTEXT>"

    def item_text(self, media: ProcessedMedia, index: int, following: str = "") -> str:
        form = self.placeholder(media.modality, index)
        return f"Frame1: {form}" if media.modality == "video" else form

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        if isinstance(media, DecodedVideo):
            return self._process_video(media)
        pixels, settings = pixels_of(media), {**self.settings, **kwargs}
        if settings["crop_to_patches"] and settings["max_patches"] > 1:
            tiles = tiles_with_thumbnail(
                pixels,
                size_of(settings),
                int(settings["min_patches"]),
                int(settings["max_patches"]),
                int(settings["resample"]),
                thumbnail=bool(settings.get("use_thumbnail", True)),
            )
        else:
            tiles = [resized_and_cropped(pixels, settings)]
        return self.item(tiles, {"tiles": len(tiles)})

    def _process_video(self, video: DecodedVideo) -> ProcessedMedia:
        stated = self.files.preprocessor("video").items()
        settings = {**TILES, **{key: value for key, value in stated if value is not None}}
        if (size := size_of(settings)) != (side := size_of(self.settings)):
            raise ConfigError(
                f"video_preprocessor_config.json makes frames of {size[0]} x {size[1]} pixels; "
                f"tiles of images have {side[0]} x {side[1]}"
            )
        frames = [resized_and_cropped(one, settings) for one in video.frames]
        tensors = (
            to_tensor("pixels", np.stack(frames)),
            to_tensor("scale_shift", scale_shift(settings)),
        )
        return ProcessedMedia("video", tensors, {"tiles": len(frames)})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        if media.modality == "video":
            return self._expand_video(tiles_of(media, "tiles", self.per_tile))
        rows = tiles_of(media, "tiles", self.per_tile) * self.per_tile
        ids = (self.token("<img>"), *[self.image_id] * rows, self.token("</img>"))
        return Expansion(ids, ((1, rows),), replaces=(self.image_id,))

    def _expand_video(self, frames: int) -> Expansion:
        start, end = self.token("<img>"), self.token("</img>")
        ids: list[int] = []
        runs = []
        for number in range(1, frames + 1):
            if number > 1:  # the first is in the text of the prompt
                ids += self.files.tokenize(f"\nFrame{number}: ")
            ids.append(start)
            runs.append((len(ids), self.per_tile))
            ids += [*[self.image_id] * self.per_tile, end]
        return Expansion(tuple(ids), tuple(runs), replaces=(self.token("<video>"),))
