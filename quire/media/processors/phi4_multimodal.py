"""Images of Phi-4-multimodal: as many tiles as cover the image, of which the last may be padded.

Recordings: log-mel features, and a token for each 80 ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from quire.errors import ConfigError, RequestError
from quire.media.image_ops import pad, resize, to_tensor
from quire.media.processor import (
    DecodedAudio,
    DecodedMedia,
    Expansion,
    KwargRange,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._emphasized_mel import EmphasizedMel
from quire.media.processors._pixels import SIGLIP, ImageProcessor, pixels_of, size_of
from quire.media.processors._tiles import nearest_grid

MOST_TILES = 36
SHORTEST = 10
"""Pixels of a side of a resized image."""
BILINEAR = 2
IMAGE_ID, AUDIO_ID = 200010, 200011


class Processor(ImageProcessor):
    modalities: tuple[Modality, ...] = ("image", "audio")
    most_seconds = 600
    defaults = SIGLIP | {"size": {"height": 448, "width": 448}, "dynamic_hd": MOST_TILES}
    allowed_kwargs: ClassVar = {"dynamic_hd": KwargRange(int, 1, MOST_TILES)}

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = files.config.get("vision_config") or {}
        self.side = int(vision.get("image_size") or 448)
        self.patch = int(vision.get("patch_size") or 14)
        audio: dict[str, Any] = files.config.get("audio_config") or {}
        self.reduction = int(audio.get("time_reduction") or 8)
        stated = files.preprocessor("audio")
        self.sampling_rate = int(stated.get("sampling_rate") or 16_000)
        self.features = EmphasizedMel(
            int(audio.get("input_size") or 80),
            rate=self.sampling_rate,
            n_fft=int(stated.get("n_fft") or 512),
            width=int(stated.get("win_length") or 400),
            hop=int(stated.get("hop_length") or 160),
            emphasis=float(stated.get("preemphasis") or 0.97),
            top=float(stated.get("mel_max_frequency") or 7690),
        )
        if (size := size_of(self.settings)) != (self.side, self.side):
            raise ConfigError(
                f"preprocessor_config.json makes tiles of {size[0]} x {size[1]} pixels; the "
                f"model's vision tower reads {self.side} x {self.side}"
            )
        if not 1 <= (most := int(self.settings["dynamic_hd"])) <= MOST_TILES:
            raise ConfigError(
                f"preprocessor_config.json: dynamic_hd is {most}; it must be in [1, {MOST_TILES}]"
            )

    def prompt_kwargs(self, modalities: Sequence[Modality]) -> Settings:
        return {"beside_images": "image" in modalities} if "audio" in modalities else {}

    @property
    def audio_id(self) -> int:
        """Id of the placeholder of a recording, which each of its rows has too."""
        audio: dict[str, Any] = self.files.config.get("audio_config") or {}
        return int(audio.get("audio_token_id") or AUDIO_ID)

    @property
    def image_id(self) -> int:
        vision: dict[str, Any] = self.files.config.get("vision_config") or {}
        return int(vision.get("image_token_id") or IMAGE_ID)

    def placeholder(self, modality: str, index: int) -> str:
        return f"<|{modality}|>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        if isinstance(media, DecodedAudio):
            return self._process_audio(media, beside_images=bool(kwargs.get("beside_images")))
        pixels, side = pixels_of(media), self.side
        height, width = pixels.shape[:2]
        y, x = math.ceil(height / side), math.ceil(width / side)
        if y * x > (most := int({**self.settings, **kwargs}["dynamic_hd"])):
            y, x = nearest_grid(height, width, (side, side), 1, most)
        ratio_x, ratio_y = x * side / width, y * side / height
        if ratio_x < ratio_y:
            size = int(height * ratio_x), x * side
        else:
            size = y * side, int(width * ratio_y)
        if min(size) < SHORTEST:
            raise RequestError(
                f"the image has {width} x {height} pixels, which become {size[1]} x {size[0]}: "
                f"both sides must keep {SHORTEST}",
                param="image",
            )
        made = pad(resize(pixels, *size, BILINEAR), y * side, x * side, color=(255, 255, 255))
        cells = [(whole * side - got) // self.patch for whole, got in zip((y, x), size)]
        valid = [n * side // self.patch - cut for n, cut in zip((y, x), cells)]
        tensors = (
            to_tensor("pixels", made),
            to_tensor("scale_shift", self.scale_shift),
            to_tensor("valid", np.zeros(valid, np.uint8)),
        )
        return ProcessedMedia("image", tensors, {"valid": tuple(valid)})

    def _process_audio(self, audio: DecodedAudio, *, beside_images: bool) -> ProcessedMedia:
        if len(audio.samples) < self.features.width:
            least = self.features.width / self.sampling_rate
            raise RequestError(f"the audio must have {least:g} s at least", param="audio")
        self.check_seconds(audio)
        made = self.features(audio.samples)
        name = "features_with_images" if beside_images else "features"
        rows = -(-len(made) // self.reduction)
        return ProcessedMedia("audio", (to_tensor(name, made),), {"rows": rows})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        if media.modality == "audio":
            rows, ids = int(media.sizes["rows"]), (self.audio_id,)
            return Expansion(ids * rows, ((0, rows),), replaces=ids)
        tall, wide = (-(-int(size) // 2) for size in media.sizes["valid"])
        square = self.side // self.patch // 2
        rows = tall * (wide + 1) + 1 + square * (square + 1)
        ids = (self.image_id,)
        return Expansion(ids * rows, ((0, rows),), replaces=ids)
