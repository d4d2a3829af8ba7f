"""Images of LLaVA-NeXT-Video: as LLaVA-NeXT's. Frames of a video are pooled: 144 rows each."""

from __future__ import annotations

import numpy as np

from quire.errors import ConfigError
from quire.media.image_ops import to_tensor
from quire.media.processor import (
    DecodedMedia,
    DecodedVideo,
    Expansion,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors import llava_next
from quire.media.processors._pixels import CLIP, resized_and_cropped, scale_shift, size_of


class Processor(llava_next.Processor):
    modalities = ("image", "video")

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        stated = files.preprocessor("video").items()
        self.frames = {**CLIP, **{key: value for key, value in stated if value is not None}}
        self.frames["do_pad"] = False  # here it is about batches
        self.frame_shift = scale_shift(self.frames)
        cropped = self.frames.get("do_center_crop")
        if (size := size_of(self.frames, "crop_size" if cropped else "size")) != (self.side,) * 2:
            raise ConfigError(
                f"video_preprocessor_config.json makes frames of {size[0]} x {size[1]} pixels; the "
                f"model's vision tower reads {self.side} x {self.side}"
            )
        stride = int(files.config.get("spatial_pool_stride") or 2)
        self.frame_rows = (self.side // self.patch // stride) ** 2

    def placeholder(self, modality: str, index: int) -> str:
        if modality == "video":
            return str(self.files.processor.get("video_token") or "<video>")
        return super().placeholder(modality, index)

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        if not isinstance(media, DecodedVideo):
            return super().process(media, kwargs)
        frames = [resized_and_cropped(one, self.frames) for one in media.frames]
        tensors = (
            to_tensor("pixels", np.stack(frames)),
            to_tensor("scale_shift", self.frame_shift),
        )
        return ProcessedMedia("video", tensors, {"rows": self.frame_rows * len(frames)})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows = int(media.sizes["rows"])
        ids = (self.image_id if media.modality == "image" else self.video_id,)
        return Expansion(ids * rows, ((0, rows),), replaces=ids)
