"""Images and videos of Qwen2.5-Omni, as Qwen2.5-VL's, and recordings: a token for each 40 ms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from quire.errors import RequestError
from quire.media.audio_ops import LogMel
from quire.media.image_ops import to_tensor
from quire.media.processor import (
    DecodedAudio,
    DecodedMedia,
    ExpandedItem,
    Expansion,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors import qwen2_5_vl
from quire.media.processors._qwen import Cells


class Processor(qwen2_5_vl.Processor):
    modalities: tuple[Modality, ...] = ("image", "video", "audio")
    tokens: ClassVar[dict[Modality, str]] = {
        "image": "<|IMAGE|>",
        "video": "<|VIDEO|>",
        "audio": "<|AUDIO|>",
    }
    marks: ClassVar[tuple[str, str]] = ("bos", "eos")
    """Ends of the names of the tokens around an item."""
    least_frames: ClassVar[int] = 3
    """Of a recording; fewer make no token."""
    most_seconds: ClassVar[int] = 300
    """Of a recording."""

    def __init__(self, files: ProcessorFiles) -> None:
        config = {**files.config, **(files.config.get("thinker_config") or {})}
        # the position of a second has another name than in Qwen2.5-VL
        rate = int(config.get("position_id_per_seconds", 25))
        config["vision_config"] = {**(config.get("vision_config") or {}), "tokens_per_second": rate}
        super().__init__(replace(files, config=config))
        stated = files.preprocessor("audio")
        self.sampling_rate = int(stated.get("sampling_rate") or 16_000)
        self._mel: dict[str, Any] = {
            "rate": self.sampling_rate,
            "n_fft": int(stated.get("n_fft") or 400),
            "hop": int(stated.get("hop_length") or 160),
        }
        self._bins = int((config.get("audio_config") or {}).get("num_mel_bins", 128))

    def _read_settings(self, modality: Modality) -> dict[str, Any]:
        """Bounds of videos that have no file of their own are not those of images."""
        found = super()._read_settings(modality)
        if modality == "video" and "video" not in self.files.preprocessors:
            found |= {"min_pixels": None, "max_pixels": None, **self.defaults["video"]}
        return found

    def placeholder(self, modality: Modality, index: int) -> str:
        kind, (start, end) = "audio" if modality == "audio" else "vision", self.marks
        return f"<|{kind}_{start}|>{self.tokens[modality]}<|{kind}_{end}|>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        if not isinstance(media, DecodedAudio):
            return super().process(media, kwargs)
        samples, hop = media.samples, int(self._mel["hop"])
        if len(samples) > self.most_seconds * self.sampling_rate:
            raise RequestError(f"the audio is longer than {self.most_seconds} s", param="audio")
        frames = -(-len(samples) // hop)
        if frames < self.least_frames:
            shortest = (self.least_frames - 1) * hop / self.sampling_rate
            raise RequestError(f"the audio must be longer than {shortest:g} s", param="audio")
        seconds = len(samples) // self.sampling_rate + 2  # the last frame reads silence behind it
        features = LogMel(self._bins, seconds=seconds, **self._mel)(samples)[:, :frames]
        tensor = to_tensor("input_features", np.ascontiguousarray(features))
        return ProcessedMedia("audio", (tensor,), {"rows": self.audio_rows(frames)})

    def audio_rows(self, frames: int) -> int:
        """Return the rows of a recording with so many frames."""
        return ((frames - 1) // 2 + 1) // 2

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        if media.modality != "audio":
            return super().expand(media, index)
        pad, rows = self.id_of("audio_token_id", self.tokens["audio"]), int(media.sizes["rows"])
        return Expansion((pad,) * rows, ((0, rows),), replaces=(pad,))

    def cells(self, item: ExpandedItem) -> Iterator[tuple[int, Cells]]:
        """Positions of recordings are those of text."""
        if item.modality != "audio":
            yield from super().cells(item)

    def id_of(self, field: str, text: str) -> int:
        older = field.replace("_id", "_index")
        return super().id_of(older if older in self.files.config else field, text)
